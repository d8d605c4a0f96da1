"""torch's fast path of encoder layers would go past the collectives of the modules inside."""

import torch
from torch import nn

import slapo_py as slapo
from tests.mesh.conftest import Run

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


def _without_gradients() -> float:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    sch = slapo.create_schedule(model, (X,))
    for place in sch.select("layers.*"):
        place["linear1"].shard("weight", "bias", dim="out")
        place["linear2"].shard("weight", dim="in")
    sch.auto_sync("tp")
    built = slapo.build(sch, mesh={"tp": 2}).eval()
    enabled = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        found, expected = built(X), model.eval()(X)
    assert torch.backends.mha.get_fastpath_enabled() is enabled is True
    return float((found - expected).abs().max())


def test_evaluation_without_gradients_sums_over_the_ranks(on_ranks: Run) -> None:
    for error in on_ranks(2, _without_gradients):
        assert error < 1e-5
