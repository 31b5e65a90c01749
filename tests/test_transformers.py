"""What transformers makes of the files and shards we write: `from_pretrained` of a tiny model.

In a process of its own: importing transformers takes ten seconds and warns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json, os, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import ckptool

folder = sys.argv[1]
config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=16,
                    bos_token_id=0, eos_token_id=0)
torch.manual_seed(0)
net = GPT2LMHeadModel(config)
torch.save({"state_dict": net.state_dict(), "epoch": 3}, f"{folder}/net.pth")
said = {}
ways = {
    "one": {},
    "shards": {"max_shard_size": "2KB"},
    "written twice": {"max_shard_size": "2KB", "tied": "duplicate"},
    "half": {"dtype": "float16"},
}
for way, options in ways.items():
    out = f"{folder}/{way}"
    done = ckptool.convert(f"{folder}/net.pth", out, to="shards", **options)
    config.save_pretrained(out)
    read, info = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    dtype = torch.float16 if way == "half" else torch.float32
    said[way] = {
        "files": len(done.outputs),
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(info["mismatched_keys"]),
        "equal": all(
            torch.equal(mine.to(dtype), theirs.to(dtype))
            for mine, theirs in zip(net.state_dict().values(), read.state_dict().values(), strict=True)
        ),
        "tied": read.lm_head.weight.data_ptr() == read.transformer.wte.weight.data_ptr(),
    }
print(json.dumps(said))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is in the dev extra"
)
def test_from_pretrained_reads_what_we_write(tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])

    assert set(said) == {"one", "shards", "written twice", "half"}
    for way, found in said.items():
        files = found.pop("files")
        assert files == 1 if way in ("one", "half") else files > 3, way
        assert found == {
            "missing": [], "unexpected": [], "mismatched": [], "equal": True, "tied": True,
        }, way  # fmt: skip
