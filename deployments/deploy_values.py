"""The values that `prefect.yaml` takes from the environment, each with a default.

Prefect runs `deploy_values` as a build step of `prefect deploy`, before it fills in the file's
`{{ virnuc.… }}`. Its own way to read the environment, `{{ $NAME }}`, knows no defaults.
"""

import os
from typing import Final

from prefect.settings import get_current_settings

DEFAULT_POOL: Final = "gpu"
DEFAULT_PROFILE: Final = "phase10-1m"
VARIABLE_OF_PATH: Final = {
    "models": "VIRNUC_MODELS",
    "reads": "VIRNUC_READS",
    "inbox": "VIRNUC_INBOX",
    "out": "VIRNUC_OUT",
}
NIGHTLY_PATHS: Final = ("models", "reads", "out")
INBOX_PATHS: Final = ("models", "inbox", "out")


def deploy_values() -> dict[str, str | bool | list[str]]:
    """Return what `prefect.yaml` names as `{{ virnuc.NAME }}`.

    Returns:
        The paths and the profile of the environment, the work pool, whether the two schedules are
        on, and the notes with which descriptions begin. A path that is not set is a text that says
        so; `reads` is a list, which is then empty. A note is empty if nothing is missing.
    """
    paths: dict[str, str] = {}
    unset_variables = {}
    for name, variable in VARIABLE_OF_PATH.items():
        path = os.environ.get(variable, "").strip()
        if not path:
            unset_variables[name] = variable
            path = f"not set: {variable}"
        paths[name] = path

    nightly_missing = [unset_variables[name] for name in NIGHTLY_PATHS if name in unset_variables]
    inbox_missing = [unset_variables[name] for name in INBOX_PATHS if name in unset_variables]
    models_note = ""
    if "models" in unset_variables:
        models_note = f"**Name the models in each run: {VARIABLE_OF_PATH['models']} is not set.** "
    return {
        **paths,
        "reads": [paths["reads"]] if "reads" not in unset_variables else [],
        "profile": os.environ.get("VIRNUC_PROFILE", "").strip() or DEFAULT_PROFILE,
        "pool": get_current_settings().deployments.default_work_pool_name or DEFAULT_POOL,
        "nightly_on": not nightly_missing,
        "inbox_on": not inbox_missing,
        "nightly_note": _off_note(nightly_missing),
        "inbox_note": _off_note(inbox_missing),
        "models_note": models_note,
    }


def _off_note(missing_variables: list[str]) -> str:
    """Return the note of a schedule that is off until these variables are set."""
    if not missing_variables:
        return ""
    names = ", ".join(missing_variables)
    return f"**Off until you set {names} and deploy again.** "
