from __future__ import annotations

from specdec.drafting.model import ModelDraft
from specdec.sampling.choose import RowToChoose
from specdec.sampling.history import RowContext, TokenHistory
from specdec.types import SamplingParams

PARAMS = SamplingParams(seed=3)


def test_each_token_is_chosen_at_its_own_position_with_the_requests_parameters() -> None:
    draft = ModelDraft(PARAMS, num_tokens=3, start=10, history=TokenHistory())
    choices = []
    while not draft.done:
        choices.append(draft.next_choice())
        draft.tokens.append(0)
    assert choices == [RowToChoose(PARAMS, position) for position in (10, 11, 12)]


def test_the_context_is_the_history_where_parameters_need_it() -> None:
    history, params = TokenHistory(), SamplingParams(presence_penalty=1.0)
    choice = ModelDraft(params, num_tokens=1, start=0, history=history).next_choice()
    assert choice == RowToChoose(params, 0, RowContext(history))


def test_a_draft_of_nothing_is_done() -> None:
    assert ModelDraft(PARAMS, num_tokens=0, start=10, history=TokenHistory()).done
