"""Commands about the daemon's models: inspect, pull, load, list, ps, unload, rm, alias."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from sakuradite.cli.exits import UsageError
from sakuradite.cli.options import (
    Backend,
    Device,
    Dtype,
    Json,
    Model,
    Offline,
    Revision,
    Setting,
    checkpoint_name,
    model_config,
)
from sakuradite.cli.output import ago, print_fields, print_json, print_table, size
from sakuradite.cli.place import place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sakuradite import SyncClient
    from sakuradite.operations import Inspection, ModelStatus, Operation

NoWait = Annotated[bool, typer.Option("--no-wait", help="Return at once with the operation; it goes on at the daemon.")]


def inspect(
    context: typer.Context, model: Model, revision: Revision = None, offline: Offline = False, json: Json = False
) -> None:
    """Show what a checkpoint is, without its weights."""
    with place_of(context).client() as client:
        found = client.models.inspect(checkpoint_name(model), revision=revision, offline=offline)
    if json:
        print_json(found)
    else:
        print_fields(_inspection(found))


def pull(
    context: typer.Context,
    model: Model,
    revision: Revision = None,
    offline: Offline = False,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Download a model without loading it."""
    with place_of(context).client() as client:
        operation = client.models.pull(checkpoint_name(model), revision=revision, offline=offline)
        _finish(client, operation, no_wait, json, f"{model} is downloaded")


def load(
    context: typer.Context,
    model: Model,
    backend: Backend = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    offline: Offline = False,
    set_: Setting = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Load a model and keep it in memory. It is downloaded first if needed."""
    config = model_config(model, set_, backend=backend, device=device, dtype=dtype, revision=revision, offline=offline)
    with place_of(context).client() as client:
        operation = client.models.load(config)
        _finish(client, operation, no_wait, json, f"{model} is loaded")
        if not no_wait and not json:
            for line in _warnings(s for s in client.models.list() if s.model == operation.model):
                print(line, file=sys.stderr)


def list_(context: typer.Context, json: Json = False) -> None:
    """List the models on disk."""
    with place_of(context).client() as client:
        stored = [status for status in client.models.list() if status.storage is not None]
    if json:
        print_json(stored)
        return
    rows = [(s.model, size(s.storage.bytes if s.storage else None), _revision(s), _kept(s), s.status) for s in stored]
    print_table(("MODEL", "SIZE", "REVISION", "KEPT", "STATUS"), rows, "nothing is downloaded")


def ps(context: typer.Context, json: Json = False) -> None:
    """Show the models that are resident or loading."""
    with place_of(context).client() as client:
        resident = [status for status in client.models.list() if status.status != "unloaded"]
    if json:
        print_json(resident)
        return
    headers = ("MODEL", "STATUS", "REPLICAS", "BACKEND", "DEVICE", "DTYPE", "CONTEXT", "ALIASES", "LOADED")
    print_table(headers, [_resident(status) for status in resident], "no model is loaded; try: sakuradite load MODEL")
    for status in resident:
        if status.last_error is not None:
            print(f"{status.model}: {status.last_error.message}")
        if status.capabilities is not None and status.capabilities.prefix_reuse.startswith("padded"):
            print(f"{status.model}: no prefix reuse: {status.capabilities.prefix_reuse.removeprefix('padded: ')}")
    for line in _warnings(resident):
        print(line)


def unload(context: typer.Context, model: Model, json: Json = False) -> None:
    """Let running requests finish, then release a model's memory."""
    with place_of(context).client() as client:
        status = client.models.unload(checkpoint_name(model))
    if json:
        print_json(status)
    else:
        print(f"{status.model} is unloaded")


def rm(context: typer.Context, model: Model, json: Json = False) -> None:
    """Delete the files of a downloaded model that is not loaded."""
    with place_of(context).client() as client:
        removed = client.models.remove(checkpoint_name(model))
    if json:
        print_json(removed)
    else:
        print(f"{removed.model} is removed")


def alias(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="`default` names the default model.")] = None,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model it is to name.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias NAME.")] = False,
    json: Json = False,
) -> None:
    """List the aliases, set one, or remove one."""
    if (remove and (name is None or model is not None)) or (not remove and (name is None) != (model is None)):
        raise UsageError("alias takes nothing, NAME MODEL, or NAME --remove")
    with place_of(context).client() as client:
        if name is None:
            found = list(client.models.aliases())
        elif model is None:
            found = [client.models.delete_alias(name)]
        else:
            found = [client.models.set_alias(name, checkpoint_name(model))]
    if json:
        print_json(found)
    else:
        print_table(("ALIAS", "MODEL"), [(a.alias, a.model) for a in found], "there are no aliases")


def wait_for(client: SyncClient, operation: Operation) -> Operation:
    """The end of an operation, its progress told on stderr. An interrupted wait leaves it going on at the daemon."""
    from sakuradite.cli.progress import operation_progress

    try:
        with operation_progress(operation.model) as tell:
            return client.models.wait(operation, on_progress=tell)
    except KeyboardInterrupt:
        print(f"the {operation.kind} goes on; end it with: sakuradite unload {operation.model}", file=sys.stderr)
        raise


def _finish(client: SyncClient, operation: Operation, no_wait: bool, json: bool, done: str) -> None:
    """Wait for an operation unless that is not wanted, and print how it stands."""
    if not no_wait:
        operation = wait_for(client, operation)
    if json:
        print_json(operation)
    elif no_wait:
        print(operation.id)
    else:
        print(done)


def _inspection(found: Inspection) -> list[tuple[str, str]]:
    fields = [
        ("model", found.model),
        ("revision", found.revision or "-"),
        ("architecture", found.architecture or "-"),
        ("modalities", ", ".join(found.modalities)),
        ("context", f"{found.context_length} tokens" if found.context_length else "-"),
        ("parameters", f"{found.parameters:,}" if found.parameters else "-"),
        ("weights", size(found.weight_bytes)),
        ("dtype", found.dtype or "-"),
        ("quantization", found.quantization or "none"),
        ("tokenizer", found.tokenizer or "no fast tokenizer"),
        ("chat template", "yes" if found.chat_template else "no"),
        ("prefix reuse", found.prefix_reuse or "-"),
    ]
    fields += [(f"backend {name}", _support(b.supported, b.reason)) for name, b in found.backends.items()]
    return [*fields, ("probabilities", "normalised over the candidates, not calibrated")]


def _support(supported: bool, reason: str | None) -> str:
    return "yes" if supported else f"no: {reason or 'not supported'}"


def _warnings(statuses: Iterable[ModelStatus]) -> Iterator[str]:
    """What their workers found and a user should know, such as weights that had to be unpacked."""
    for status in statuses:
        for warning in status.capabilities.warnings if status.capabilities else ():
            yield f"{status.model}: warning: {warning}"


def _resident(status: ModelStatus) -> tuple[str, ...]:
    able = status.capabilities
    return (
        status.model,
        status.status,
        f"{status.replicas.ready}/{status.replicas.target}",
        able.backend if able else "-",
        able.device if able else "-",
        able.dtype if able else "-",
        str(able.max_input_tokens) if able else "-",
        ", ".join(status.aliases) or "-",
        ago(status.loaded_at),
    )


def _revision(status: ModelStatus) -> str:
    return ((status.storage.revision if status.storage else None) or "-")[:12]


def _kept(status: ModelStatus) -> str:
    if status.storage is None or not status.storage.managed:
        return "elsewhere"
    return "here" if status.storage.complete else "here, incomplete"
