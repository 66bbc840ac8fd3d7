# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture of experts: which experts, which weights, what a capacity drops, how even the load is."""

import pytest

torch = pytest.importorskip("torch")

from megascale_kernels.moe.router import capacity, route  # noqa: E402

LOGITS = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 4.0, 1.0], [9.0, 0.0, 1.0, 2.0]])


def test_the_best_experts_are_chosen_and_their_weights_add_up() -> None:
    """Softmax or sigmoid, the order is that of the logits; normalised weights of a token add up to one."""
    for score in ("softmax", "sigmoid"):
        routed = route(LOGITS, 2, score=score)

        assert routed.ids.tolist() == [[0, 2], [1, 2], [0, 3]]
        assert routed.ids.dtype == torch.int32
        torch.testing.assert_close(routed.gates.sum(dim=1), torch.ones(3))
        assert routed.load.tolist() == [2, 1, 2, 1]


def test_weights_that_are_not_normalised_are_the_scores() -> None:
    """Softmax over all experts, or each expert's sigmoid."""
    soft = route(LOGITS, 2, normalise=False)
    sigmoid = route(LOGITS, 2, score="sigmoid", normalise=False)

    torch.testing.assert_close(soft.gates, LOGITS.softmax(dim=1).gather(1, soft.ids.long()))
    torch.testing.assert_close(sigmoid.gates, LOGITS.sigmoid().gather(1, sigmoid.ids.long()))


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    """With a large bias an expert is always chosen; its weight stays its score."""
    routed = route(LOGITS, 1, normalise=False, bias=torch.tensor([0.0, 0.0, 0.0, 9.0]))

    assert routed.ids.tolist() == [[3], [3], [3]]
    torch.testing.assert_close(routed.gates[:, 0], LOGITS.softmax(dim=1)[:, 3])


def test_a_capacity_drops_later_tokens_first() -> None:
    """An expert takes what it may, in the order of tokens; who is dropped has expert -1 and its weight stays."""
    logits = torch.tensor([[1.0, 0.0]] * 4)

    routed = route(logits, 1, capacity_factor=1.0)

    assert capacity(4, 1, 2, 1.0) == 2
    assert routed.ids[:, 0].tolist() == [0, 0, -1, -1]
    assert routed.load.tolist() == [4, 0]
    assert routed.kept.tolist() == [2, 0]


def test_the_balance_loss_is_one_when_even_and_the_number_of_experts_when_not() -> None:
    """Switch (2101.03961), equation 4, without its factor; it can be differentiated."""
    even = route(torch.eye(4) * 50.0, 1)
    uneven = route(torch.tensor([[50.0, 0.0, 0.0, 0.0]] * 4).requires_grad_(), 1)

    assert float(even.balance_loss) == pytest.approx(1.0)
    assert float(uneven.balance_loss.detach()) == pytest.approx(4.0)
    uneven.balance_loss.backward()


def test_no_tokens_are_routed_nowhere() -> None:
    """Zero tokens are no error."""
    routed = route(torch.zeros(0, 4), 2, capacity_factor=1.0)

    assert routed.ids.shape == (0, 2)
    assert float(routed.balance_loss) == 0
