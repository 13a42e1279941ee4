"""Deployments refuse parameters that their flow does not have."""

from typing import Any

from prefect.utilities import callables


class StrictParameterSchema(callables.ParameterSchema):
    """The schema of a flow's parameters, in which other names are errors."""

    additionalProperties: bool  # noqa: N815 - a word of JSON Schema

    def __init__(self, **schema: Any) -> None:
        # set explicitly, because fields that are not set are left out where a flow is deployed
        super().__init__(**schema, additionalProperties=False)


def refuse_unknown_parameters() -> None:
    """Let servers refuse a new run with a parameter that its flow does not have.

    A server checks the parameters of a run against the schema that it got when the flow was
    deployed. Prefect's schema allows other names, has no setting for it, and is made anew wherever
    a flow is deployed. So its class is replaced.
    """
    callables.ParameterSchema = StrictParameterSchema  # type: ignore[misc]
