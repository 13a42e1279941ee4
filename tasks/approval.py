"""The form that a reviewer of a validation fills in."""

from typing import Any, Final, Literal

from prefect.input import RunInput
from pydantic import ConfigDict, Field, create_model

from virnuc.tasks.report import with_verdict_marks
from virnuc_core.profiles import QUESTIONS, Answer, Review
from virnuc_core.report import messages
from virnuc_core.report.model import Report
from virnuc_core.report.render import approval_markdown
from virnuc_core.report.views.criteria import criteria_section

# the answer that is given when no reviewer answers in time
TIME_OUT_ANSWER: Final = {
    "verdict": "pending",
    "reviewer": "nobody (time-out)",
    "note": "no answer came before the time-out",
}


# A rule of JSON Schema, by which the server refuses an approval with open questions: where the
# verdict is `approved`, each question must be there and be answered with yes or no.
APPROVED_IN_FULL: Final[dict[str, Any]] = {
    "if": {"properties": {"verdict": {"const": "approved"}}, "required": ["verdict"]},
    "then": {
        "properties": {name: {"enum": ["yes", "no"]} for name in QUESTIONS},
        "required": list(QUESTIONS),
    },
}


class Approval(Review, RunInput):
    """What the reviewer is asked."""

    model_config = ConfigDict(json_schema_extra=APPROVED_IN_FULL)

    verdict: Literal["approved", "rejected", "pending"] = Field(
        description="The decision. To approve, answer every question with yes or no"
    )
    reviewer: str = Field(min_length=1, max_length=200, description="Who decides")


def approval_form(report: Report) -> type[Approval]:
    """Return the form for a reviewer.

    Each question stands with its figures, because the UI may hide the table above the form. The
    question comes first: the UI renders it as Markdown, in which a number at the start would become
    a list.

    Args:
        report: What the reviewer is to judge.
    """
    criteria = with_verdict_marks(criteria_section(report).rows)
    introduction = approval_markdown(report, criteria)
    hints = messages.question_hints(report)
    questions: dict[str, Any] = {}
    for name, question in QUESTIONS.items():
        description = f"{question} {hints[name]}".strip()
        questions[name] = (Answer, Field("not answered", description=description))
    form = create_model("Approval", __base__=Approval, **questions)
    return form.with_initial_data(description=introduction)
