"""Images and text on MLX: SmolVLM, Idefics3 and LFM2-VL through mlx-vlm.

Rows run one by one, unpadded. What the vision tower made of a request's images is kept with the images and used again
by every row that shows the same ones. In float32 an input of `PREFILL_TOKENS` or more fills the language model's cache
first, up to the first position that is read; in lower precision everything is one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from sakuradite.engine.backend import Group, Images, ModelFacts, OutOfDeviceMemory, Prefix, Row, RowScores
from sakuradite.engine.mlx import runtime
from sakuradite.engine.mlx.body import Body, stand_in
from sakuradite.engine.mlx.loading import Loaded
from sakuradite.engine.mlx.scores import fault, read
from sakuradite.engine.mlx.text import PREFILL_STEP
from sakuradite.errors import UnsupportedModelError

PREFILL_TOKENS = 512


class VisionBackend:
    """An image and text model on MLX."""

    def __init__(self, loaded: Loaded, max_input_tokens: int) -> None:
        self._model = loaded.model
        self._language = loaded.model.language_model
        self._body = Body(loaded.model)
        self._side: int | None = None
        if "vision_model" in loaded.model:
            self._side = int(loaded.translation.settings["vision_config"]["image_size"])
            tower = loaded.model.vision_model
            stand_in(tower, "embeddings", WholeGrid(tower["embeddings"]))
            tower.post_layernorm.eps = float(loaded.translation.settings["vision_config"]["layer_norm_eps"])
        self._cache_module = runtime.library("mlx_vlm.models.cache")
        translation = loaded.translation
        self._image_token = int(translation.settings["image_token_id"])
        self._vocabulary = int(translation.settings["text_config"]["vocab_size"])
        self._context = translation.context_length or max_input_tokens
        self._prefills = loaded.dtype == "float32" and not loaded.packed
        self.facts = ModelFacts(
            architecture=translation.model_type,
            device=loaded.device,
            dtype=loaded.dtype,
            context_length=self._context,
            vocabulary_size=self._vocabulary,
            parameters=loaded.parameters,
            weight_bytes=loaded.weight_bytes,
            layout="padded",
            layout_reason="image models keep complete, unpadded rows, one at a time",
            modalities=("text", "image"),
            warnings=translation.warnings,
        )

    def set_head(self, tokens: Sequence[int]) -> None:
        """Nothing to do: prefixes with images are never shared."""

    def score(self, groups: Sequence[Group]) -> list[list[RowScores | Exception]]:
        """Scores of every row. Raises OutOfDeviceMemory; other failures as MLX raises them."""
        try:
            return [[self._row(group.prefix, row) for row in group.rows] for group in groups]
        except RuntimeError as error:
            if runtime.is_out_of_memory(error):
                mx.clear_cache()
                raise OutOfDeviceMemory(str(error)) from error
            raise

    def release(self, prefix: Prefix) -> None:
        """Let go of a prefix's images."""
        if prefix.extras:
            prefix.extras.clear()
            mx.clear_cache()

    def close(self) -> None:
        """Free the weights and MLX's pool of freed buffers."""
        del self._model, self._language, self._body
        mx.clear_cache()

    def _row(self, prefix: Prefix, row: Row) -> RowScores | Exception:
        images: Images | None = prefix.extras.get("images")
        if found := fault(prefix, row, self._vocabulary, self._context) or self._image_fault(images):
            return found
        inputs = mx.array([[*prefix.tokens, *row.suffix]])
        embedded = self._embed(inputs, images)
        reads = [len(prefix.tokens) + one.offset for one in row.reads]
        caches, start = None, 0
        if self._prefills and inputs.shape[1] >= PREFILL_TOKENS:
            caches, start = self._cache_module.make_prompt_cache(self._language), min(reads)
            for begin in range(0, start, PREFILL_STEP):
                end = min(begin + PREFILL_STEP, start)
                self._language(inputs[:, begin:end], inputs_embeds=embedded[:, begin:end], cache=caches)
                mx.eval(
                    [cache.state for cache in caches]
                )  # the head's output is left unasked for, so it is not computed
        self._body.positions = (mx.array([0] * len(reads)), mx.array([offset - start for offset in reads]))
        try:
            logits = self._language(inputs[:, start:], inputs_embeds=embedded[:, start:], cache=caches).logits
        finally:
            self._body.positions = None
        return read(logits[0], [row])[0]

    def _embed(self, inputs: Any, images: Images | None) -> Any:
        """The embeddings of a row, image features in place of image tokens."""
        arrays = {name: mx.array(array) for name, array in images.arrays.items()} if images else {}
        pixels = arrays.pop("pixel_values", None)
        kept = images.features if images else None
        found = self._model.get_input_embeddings(inputs, pixels, cached_image_features=kept, **arrays).inputs_embeds
        if images is not None and kept is None:
            # Read back from where they were put: one way for all families, without naming their parts.
            places = [n for n, token in enumerate(inputs[0].tolist()) if token == self._image_token]
            images.features = found[0, mx.array(places)]
            mx.eval(images.features)
        return found

    def _image_fault(self, images: Images | None) -> UnsupportedModelError | None:
        """mlx-vlm's Idefics3 is right for images that fill the vision tower's grid, as the processors make them.

        It does not mask padding inside an image (answers were off by 0.03); padding images as a whole it leaves out.
        """
        if images is None or self._side is None:
            return None
        height, width = images.arrays["pixel_values"].shape[-2:]
        if (height, width) != (self._side, self._side):
            return UnsupportedModelError(
                f"an image prepared as {width}x{height} is refused on MLX: this model's are {self._side}x{self._side}"
            )
        mask = images.arrays.get("pixel_attention_mask")
        if mask is None or (mask.any((-1, -2)) == mask.all((-1, -2))).all():
            return None
        return UnsupportedModelError("an image with padding inside is refused on MLX: mlx-vlm does not mask it")


class WholeGrid:
    """Idefics3's patch embeddings for images that fill the grid: positions in order.

    mlx-vlm works them out from the mask in float32, which comes out wrong where the grid's side is no power of two (14,
    26, 27 and 28 were tried).
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, pixels: Any, mask: Any = None) -> Any:
        return self._inner(pixels, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
