"""The example at the beginning of the design, up to its first verify."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import slapo_py as slapo
from tests.fingerprint import changes, fingerprint
from tests.patterns.functions import my_add, residual


def test_the_example_of_the_design() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=32))
    ids = torch.randint(0, 64, (2, 8))
    before = fingerprint(model)
    sch = slapo.create_schedule(model, example_inputs={"input_ids": ids, "labels": ids})

    sch.select("transformer.h.*.mlp").fuse("bias_gelu")
    for block in sch.select("transformer.h.*"):
        block.trace()
        block.replace(my_add, what=residual)
        block.checkpoint()
    report = sch.verify()

    assert report.grade == "rounding"  # the tanh formula in one operation
    assert changes(before, fingerprint(model)) == []
    assert "my_add(" in str(sch["transformer.h.0"])
    assert "bias_gelu(" in str(sch["transformer.h.3.mlp"])
    assert str(sch.history).splitlines()[-3:] == [
        '    sch["transformer.h.3"].trace()',
        '    sch["transformer.h.3"].replace(tests.patterns.functions.my_add, what=tests.patterns.functions.residual)',
        '    sch["transformer.h.3"].checkpoint()',
    ]
    assert slapo.misses(sch.module) == {}
