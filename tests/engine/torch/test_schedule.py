"""What a batch makes a GPU's host wait for: one wait, after all its forwards have been set going.

The model and the packed layout run as they are on tensors that have a device and a shape and no values (torch's fake
tensors), so nothing here needs a GPU, and whatever would read a value back on the way raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from sakuradite.engine.backend import Prefix, Read, Row
from sakuradite.engine.torch import attention, cuda, forward, layers
from sakuradite.engine.torch.forward import Caller, Reading
from sakuradite.engine.torch.packed import Bounds, Packed
from sakuradite.engine.torch.rotary import Rotary

GPU = torch.device("cuda", 0)
HEAD = (1, 2, 3)
DENSE = ["llama", "mistral", "qwen3", "gemma2", "gemma3_text", "cohere2"]
EXPERTS = ["qwen3_moe", "olmoe", "gpt_oss"]  # in bfloat16, which their kernels for a GPU are for
CASES = [(name, dtype) for name in DENSE for dtype in (torch.bfloat16, torch.float32)]
CASES += [(name, torch.bfloat16) for name in EXPERTS]


class Events(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a GPU's host does, in order: `sent`, `asked back` and `waited`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        self.blocking: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        places = {a.device.type for a in inputs if a.device.type == "cuda" or a.dim() > 0}  # a number goes along
        if isinstance(out, torch.Tensor) and len(places | {out.device.type}) > 1:
            self.seen.append("sent" if out.device.type == "cuda" else "asked back")
            if not (kwargs or {}).get("non_blocking"):
                self.blocking.append((func, args))
        return out


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    """Fakes for what fake tensors cannot do: memory that is pinned, a stream that is waited for, values."""
    found = Events()
    monkeypatch.setattr(forward, "_pinned", lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    monkeypatch.setattr(forward, "_wait", lambda device: found.seen.append("waited"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))  # asked for experts' kernels
    monkeypatch.setattr(Reading, "_told", lambda self, values: list(values))
    for cached in (attention._after, cuda._ends):
        cached.cache_clear()
    yield found
    for cached in (attention._after, cuda._ends):
        cached.cache_clear()


def packed(checkpoint: Path, dtype: torch.dtype) -> Packed:
    layers.register()
    config = AutoConfig.from_pretrained(checkpoint)
    config._attn_implementation = layers.IMPLEMENTATION
    with GPU:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    made = Packed(Caller(model), Rotary(config), GPU, Bounds(160, 40, 1 << 30, 1000))
    made.set_head(HEAD)
    return made


def rows() -> list[tuple[Prefix, Row]]:
    """Two prefixes of six questions, and ten of one, each of another length."""
    prefixes = [Prefix((*HEAD, *range(n))) for n in (50, 20)]
    reads = (Read(2, (1, 2)), Read(4, (5,)))
    many = [(prefix, Row(tuple(range(5 + i)), reads)) for prefix in prefixes for i in range(6)]
    return many + [(Prefix((*HEAD, i)), Row(tuple(range(6 + i)), reads)) for i in range(10)]


@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_the_host_waits_once_for_all_forwards(
    architecture: str, dtype: torch.dtype, events: Events, tiny: Callable[..., Path]
) -> None:
    checkpoint = tiny(architecture)
    with FakeTensorMode():
        layout = packed(checkpoint, dtype)
        passes = 0
        original = layout._caller.logits

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            passes += 1
            return original(*args, **kwargs)

        layout._caller.logits = counted  # type: ignore[method-assign]
        with torch.inference_mode(), events:
            scores = layout.score(rows())
    assert len(scores) == 22
    assert passes > 2
    assert not events.blocking
    back = [event for event in events.seen if event != "sent"]
    assert back == ["asked back"] * (passes - 1) + ["waited"]  # the head's forward is not read
    assert events.seen[-len(back) :] == back


def test_what_is_sent_does_not_grow_with_the_layers(events: Events, tiny: Callable[..., Path]) -> None:
    sent = []
    for layer_count in (2, 6):
        checkpoint = tiny("llama", config={"num_hidden_layers": layer_count})
        with FakeTensorMode():
            layout = packed(checkpoint, torch.bfloat16)
            cuda._ends.cache_clear()
            events.seen.clear()
            with torch.inference_mode(), events:
                layout.score(rows())
        sent.append(events.seen.count("sent"))
    assert sent[0] == sent[1] > 0
