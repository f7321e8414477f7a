"""Published sizes of the Qwen2.5 models, so that a study can be planned before its model is downloaded."""

import re

# By the billions of parameters in the name, the values of _FIELDS: hidden size, intermediate size, blocks, query heads,
# key heads, vocabulary, tied head. Source: config.json of each model on the hub.
_SIZES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.5": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5": (1536, 8960, 28, 12, 2, 151_936, True),
    "3": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7": (3584, 18_944, 28, 28, 4, 152_064, False),
    "14": (5120, 13_824, 48, 40, 8, 152_064, False),
    "32": (5120, 27_648, 64, 40, 8, 152_064, False),
    "72": (8192, 29_568, 80, 64, 8, 152_064, False),
}
# By the variant in the name, the sizes in which it was released.
_RELEASED_SIZES = {
    "": ("0.5", "1.5", "3", "7", "14", "32", "72"),
    "Math-": ("1.5", "7", "72"),
    "Coder-": ("0.5", "1.5", "3", "7", "14", "32"),
}
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
_HUB_ID = re.compile(r"Qwen/Qwen2\.5-(|Math-|Coder-)(0\.5|1\.5|3|7|14|32|72)B(?:-Instruct)?")


def find_published_sizes(path: str) -> dict[str, int | bool] | None:
    """The fields of config.json that determine a model's shape; None unless `path` is the hub id of a Qwen2.5 model.

    Math, Coder and Instruct models have the shape of the base model of the same size. Quantized models are not listed,
    because they cannot be trained here.
    """
    match = _HUB_ID.fullmatch(path)
    if match is None or match[2] not in _RELEASED_SIZES[match[1]]:
        return None
    return dict(zip(_FIELDS, _SIZES[match[2]], strict=True))
