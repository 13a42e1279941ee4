"""Approval."""

from typing import Any, Final, Literal

from prefect.input import RunInput
from pydantic import Field, create_model

from virnuc.tasks.report import rows_of
from virnuc_core.profiles import Answer, Review
from virnuc_core.report.model import Report
from virnuc_core.report.render import (
    message,
    render_template,
)
from virnuc_core.validation import QUESTIONS

# the answer that is given when no reviewer answers in time
TIME_OUT_ANSWER: Final = {
    "verdict": "pending",
    "reviewer": "nobody (time-out)",
    "note": "no answer came before the time-out",
}


class Approval(Review, RunInput):
    """What the reviewer is asked."""

    verdict: Literal["approved", "rejected", "pending"] = Field(description="The decision")
    reviewer: str = Field(min_length=1, max_length=200, description="Who decides")


def approval_form(judged: Report) -> type[Approval]:
    """What the reviewer is asked, each question with its figures; the UI may hide the table above the form, and renders
    what it asks as Markdown, in which a number at the start would become a list of its own."""
    above = render_template("approval.md.j2", judged, rows=rows_of("criteria.view.j2", judged))
    asked: dict[str, Any] = {}
    for name, question in QUESTIONS.items():
        asked[name] = (
            Answer,
            Field("not answered", description=f"{question} {message(name, judged)}".strip()),
        )
    return create_model("Approval", __base__=Approval, **asked).with_initial_data(description=above)
