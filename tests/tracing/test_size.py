"""A model of 406 B parameters is scheduled on a laptop: few captures, little memory."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, torch, transformers
from pathlib import Path
import slapo_py as slapo

with torch.device("meta"):
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
        num_attention_heads=128, num_key_value_heads=8,
    )
    model = transformers.LlamaForCausalLM(config)
ids = torch.zeros(2, 16, dtype=torch.long)
sch = slapo.create_schedule(model, example_inputs={"input_ids": ids, "use_cache": False})
for glob in ("model.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp", "model.layers.*.*layernorm"):
    sch.select(glob).trace()
print(json.dumps({
    "parameters": sum(p.numel() for p in model.parameters()),
    "traced": len(sch.history),
    "captures": sch.root.tracer.captures,
    "notes": [note for p in sch.select("model.layers.*") for note in p.notes],
    "peak": PEAK,
    "printed": len(str(sch).splitlines()),
}))
"""


PEAK = """int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024"""
"""The most memory that this process has had, in bytes. What getrusage says may be that of the process it comes from."""


def test_llama_of_406_billion_parameters_on_meta() -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("PEAK", PEAK)], cwd=root, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["parameters"] == 405_853_388_800
    assert found["traced"] == 126 * 5
    assert found["captures"] == 4  # layer, attention, mlp, norm
    assert found["notes"] == []
    assert found["peak"] < 2 * 10**9
    assert found["printed"] < 40  # 126 equal layers are one line
