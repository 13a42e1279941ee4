#!/usr/bin/env bash
# One job of your CI: validate this machine, and fail if it is slower than at the last good run.
#
#   ci-validate.sh HISTORY READS --models DIR --profile NAME [further options of virnuc validate]
#
# HISTORY is the only file that must be kept from job to job. It is replaced only if the job ends
# with 0, so that a slow run never becomes what the next one is compared with. The first job has
# nothing to compare with: start it with VIRNUC_CI_FIRST=1. Do the same after a change of reads,
# weights, devices or profile, and to accept a run that is slower on purpose.
#
# Set VIRNUC_HOST if the name of the machine changes from job to job, as in containers.
#
# Exit codes: 0 good, 5 a criterion or the limit for regressions was missed, 7 not everything could
# be judged (there was nothing to compare with), 2 bad input, or the history was edited; others as in
# docs/operations.md.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: ci-validate.sh HISTORY READS --models DIR --profile NAME ..." >&2
    exit 2
fi
history=$1
shift
virnuc=${VIRNUC:-virnuc}
folder=${VIRNUC_CI_OUT:-ci-validation}
mkdir -p "$folder"

# The run is added to a copy of the history, which becomes the history at the end.
candidate=$folder/virnuc-history.jsonl
rm -f "$candidate"
if [ -e "$history" ]; then
    cp "$history" "$candidate"
    # Is it as virnuc left it? A validation would set a damaged line aside, and go on without it.
    "$virnuc" history "$candidate" --check >/dev/null || [ $? -ne 2 ] || exit 2
fi

"$virnuc" validate "$@" -o "$folder/out" --force --history "$candidate"
if [ ! -e "$candidate" ] || { [ -e "$history" ] && cmp -s "$history" "$candidate"; }; then
    echo "this run is not in the history (no read had an open frame, or its time is not whole)" >&2
    exit 7
fi
code=0
"$virnuc" history "$candidate" --check || code=$?
if [ "$code" -eq 7 ] && [ "${VIRNUC_CI_FIRST:-0}" = 1 ]; then
    echo "first run of its kind: the next ones are compared with it"
    code=0
fi
if [ "$code" -eq 0 ]; then
    # A rename, so that a job that is stopped here leaves the old history or the new one.
    mkdir -p "$(dirname "$history")"
    cp "$candidate" "$history.new"
    mv "$history.new" "$history"
fi
exit "$code"
