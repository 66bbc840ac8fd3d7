# SPDX-License-Identifier: Apache-2.0
"""The benchmark of MoE layers: which layers, how uneven a routing, what a row says, and what a wrong request gets."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.bench.moe import moe_command, moe_table  # noqa: E402
from megascale_kernels.bench.moe.measure import MoeRow, by_shards, operands  # noqa: E402
from megascale_kernels.bench.moe.moe_command import main, settings  # noqa: E402
from megascale_kernels.bench.moe.moe_shapes import MODELS, MoeShape, drawn, routing, wanted  # noqa: E402
from megascale_kernels.moe.skewed import shares  # noqa: E402

SHAPE = MoeShape("Mixtral-8x7B", *MODELS["Mixtral-8x7B"], 4096)


def test_published_layers_are_the_largest_tokens_last() -> None:
    """All models with each number of tokens; experts and tokens divide among the ranks."""
    layers = wanted(None, (4096, 8192), 0.0, 2)

    assert len(layers) == 2 * len(MODELS)
    assert [layer.tokens for layer in layers] == [4096] * len(MODELS) + [8192] * len(MODELS)
    with pytest.raises(ValueError, match=r"Mixtral-8x7B E8 .* multiples of the 3 GPUs"):
        wanted("Mixtral-8x7B", (4096,), 0.0, 3)
    with pytest.raises(ValueError, match="--models GPT: not one of"):
        wanted("GPT", (4096,), 0.0, 2)


def test_experts_are_cut_where_tensor_parallelism_is_asked_for() -> None:
    """Ranks hold shards of I / S, a token chooses all shards of its experts; what can't be cut is said."""
    (layer,) = wanted("Mixtral-8x7B", (4096,), 0.0, 4, 2)
    place = SimpleNamespace(
        world_size=4, rank=1, dtype=torch.float32, memory=SimpleNamespace(device=torch.device("cpu"))
    )
    small = layer._replace(hidden=32, inner=64, tokens=64)
    given = operands(small, place, 0)  # type: ignore[arg-type]  # it reads no more than that
    cut = by_shards(given, 2)

    assert given.w_in.shape == (4, 2, 32, 32)
    assert given.w_out.shape == (4, 32, 32)
    assert given.ids.shape == (16, 2)
    for chosen, shards in zip(given.ids.tolist(), cut.ids.tolist(), strict=True):
        ranks_of = [(expert // 4 * 2 + shard) * 4 + expert % 4 for expert in chosen for shard in (0, 1)]
        assert shards == ranks_of
    assert by_shards(given, 1).ids is given.ids
    assert "TP2" in layer.label
    assert moe_table.text_row(MoeRow(layer, "", {}, 0.0)).startswith("Mixtral-8x7B/TP2 ")
    for shards, ranks in ((3, 4), (0, 4), (2, 3)):
        with pytest.raises(ValueError, match=f"--tensor-parallel {shards}: .* needs a divisor of {ranks}"):
            wanted("Mixtral-8x7B", (4096,), 0.0, ranks, shards)
    with pytest.raises(ValueError, match="multiple of 16"):
        wanted("DeepSeek-MoE-16B", (4096,), 0.0, 16, 16)


def test_drawn_layers_are_the_seed_s_and_can_be_run() -> None:
    """The same seed, the same layers; ranks share experts and tokens; H and I are what kernels take."""
    layers = drawn(30, 7, 4)

    assert layers == drawn(30, 7, 4) != drawn(30, 8, 4)
    assert all(layer.experts % 4 == layer.tokens % 4 == layer.hidden % 16 == layer.inner % 16 == 0 for layer in layers)
    assert all(1 <= layer.top_k <= layer.experts for layer in layers)
    assert any(layer.tokens % 128 for layer in layers)


def test_large_random_layers_may_be_left_out() -> None:
    """Those of the same seed that are small enough, as they would be among the others."""
    asked = moe_command.parser().parse_args(["--random", "24", "--seed", "613077", "--most-gflop", "1000"])
    layers = drawn(24, 613077, 2)

    found = moe_command.wanted(asked)

    assert found == [layer for layer in layers if layer.gflop <= 1000]
    assert 0 < len(found) < len(layers)
    assert SHAPE._replace(tokens=1000, top_k=2, hidden=500, inner=100).gflop == pytest.approx(0.6)


def test_shares_are_as_uneven_as_asked_for() -> None:
    """They add up to one, with the standard deviation; a token's experts are different ones."""
    for std in (0.0, 0.01, 0.032):
        found = shares(64, std, torch.Generator().manual_seed(3))
        assert float(found.sum()) == pytest.approx(1)
        assert float(found.std(correction=0)) == pytest.approx(std, abs=1e-6)

    ids, gates = routing(SHAPE._replace(skew=0.05), 50, 1, 0, torch.device("cpu"))
    assert all(len(set(row)) == SHAPE.top_k for row in ids.tolist())
    torch.testing.assert_close(gates.sum(dim=1), torch.ones(50))


def test_a_row_compares_with_the_larger_of_products_and_bytes() -> None:
    """The text and the summary say so; a layer that failed says why and counts in no mean."""
    took = {"products": 1.0, "bytes": 1.2, "plain": 3.0, "tuned": 1.8, "kernels": 1.9, "ours": 1.5}
    row = MoeRow(SHAPE, "", took, 1e-3, way="series")
    failed = MoeRow(SHAPE, "", {}, 1.0, "wrong")

    assert row.bound == 1.2
    assert f"{2:>8.2f}{1.2:>8.2f}{0.8:>9.2f}" in moe_table.text_row(row)
    assert len(moe_table.csv_row(row)) == len(moe_table.CSV_HEADING)
    assert moe_table.text_row(row).endswith("  by series")
    assert moe_table.text_row(failed).endswith("wrong")
    assert moe_table.summary([row, failed])[:2] == [
        "1 of 2 layers measured, 1 of them run in series",
        f"over plain: 2.000 in the geometric mean, at worst 2.000 ({SHAPE.label})"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "many"], "--tokens many: comma-separated numbers"),
        (["--gpus", "0"], "--gpus, --rounds and --in-a-row are 1 or more"),
        (["--random", "2", "--tensor-parallel", "2"], "leave --tensor-parallel out"),
        (["--most-gflop", "500"], "--most-gflop leaves out random layers: give --random as well"),
        (["--config", "colour=1"], "--config colour=1: MoeConfig has"),
        (["--config", "chunks=red"], "'red' is no whole number"),
    ],
)
def test_a_wrong_request_gets_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, with exit code 2."""
    assert main(arguments) == 2

    assert said in capsys.readouterr().err
    assert settings(["kernel=triton", "chunks=3"]) == {"kernel": "triton", "chunks": 3}
