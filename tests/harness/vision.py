"""Tiny vision-language models with random weights, and batches whose images straddle the borders of shards."""

import torch
import transformers

from data.vision_models import CONFIGS, END, IMAGE, START
from harness import heads, models

LENGTH = 45
BY_GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "glm4v", "minimax_m3_vl")
"""Types whose images are of any size."""
TEXT_TYPES = {name: config["text_config"]["model_type"] for name, (_, config) in CONFIGS.items()}


def build(name, dtype=torch.float64, attention="eager"):
    class_name, sizes = CONFIGS[name]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**sizes)
    model = getattr(transformers, class_name)._from_config(
        config, attn_implementation=attention, experts_implementation="eager", dtype=torch.float32
    )
    models._make_every_parameter_matter(model)
    return model.to(dtype).train()


def batch(name, kind="images"):
    """`kind`: "images", "padded", "text", "packed"."""
    ids = heads.tokens(length=LENGTH)
    rows = 1 if kind == "packed" else 2
    ids = ids[:rows]
    if name == "mllama":
        return _tiles_of_images(ids, kind)
    spans = [] if kind == "text" else [(0, 5), (0, 24), (rows - 1, 26)][: rows + 1]
    counts = [8, 4, 16] if name in BY_GRID else [4, 4, 4] if name in ("internvl", "smolvlm") else [16, 16, 16]
    for (row, start), count in zip(spans, counts):
        ids[row, start - 1], ids[row, start + count] = START, END
        ids[row, start : start + count] = IMAGE
    inputs = {"input_ids": ids, "labels": ids.masked_fill(ids >= IMAGE, -100)}
    if kind == "padded":
        inputs["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 2]])).long()
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    if kind == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(23), torch.arange(LENGTH - 23)])[None]
        inputs["labels"][:, 23] = -100
    if name == "gemma4":
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    if name in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if name == "paligemma":  # 1 marks the suffix to predict; the prefix is bidirectional
        inputs["token_type_ids"] = (torch.arange(LENGTH) >= LENGTH - 9).long().expand(rows, -1)
        inputs["labels"] = inputs["labels"].masked_fill(inputs["token_type_ids"] == 0, -100)
    return inputs | _pixels(name, spans, ids)


def _tiles_of_images(ids, kind):
    """One image of one tile per row, visible to cross attention from its token on."""
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind == "text":
        return inputs
    ids[:, 2] = IMAGE
    pixels = torch.randn(len(ids), 1, 4, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    seen = (torch.arange(LENGTH) >= 2)[None, :, None, None] & torch.tensor([True, False, False, False])
    return inputs | {
        "labels": ids.masked_fill(ids >= IMAGE, -100),
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.ones(len(ids), 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]]).expand(len(ids), -1, -1),
        "cross_attention_mask": seen.long().expand(len(ids), -1, -1, -1),
    }


def _pixels(name, spans, ids):
    generator = torch.Generator().manual_seed(3)
    if name in BY_GRID:
        inputs = {} if name == "minimax_m3_vl" else {"mm_token_type_ids": (ids == IMAGE).int()}
        if not spans:
            return inputs
        grid = torch.tensor([[1, 4, 8], [1, 4, 4], [1, 8, 8]])[: len(spans)]
        patches = int(grid.prod(-1).sum())
        pixels = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
        return inputs | {"pixel_values": pixels, "image_grid_thw": grid}
    if not spans:
        return {}
    pixels = torch.randn(len(spans), 3, 16, 16, generator=generator, dtype=torch.float64)
    inputs = {"pixel_values": pixels}
    if name == "aria":
        inputs["pixel_mask"] = torch.ones(len(spans), 16, 16, dtype=torch.bool)
    if name == "smolvlm":  # images by row; an image of zeros is padding
        rows = [[pixels[i] for i, (row, _) in enumerate(spans) if row == b] for b in range(len(ids))]
        most = max(map(len, rows))
        inputs["pixel_values"] = torch.stack(
            [torch.stack(row + [torch.zeros_like(pixels[0])] * (most - len(row))) for row in rows]
        )
    if name == "gemma4":  # patches and their coordinates
        where = torch.cartesian_prod(torch.arange(8), torch.arange(8)).flip(-1).expand(len(spans), -1, -1)
        pixels = torch.rand(len(spans), 64, 48, generator=generator, dtype=torch.float64)
        inputs = {"pixel_values": pixels, "image_position_ids": where}
    return inputs | ({"image_sizes": torch.tensor([[16, 16]] * len(spans))} if name == "mistral3" else {})
