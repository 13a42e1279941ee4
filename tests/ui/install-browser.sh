#!/bin/sh
# The UI tests drive Debian's own Chromium; nothing is downloaded from anywhere else.
set -eu
command -v chromium >/dev/null 2>&1 && exit 0
if [ "$(id -u)" -eq 0 ]; then run=""; else run="sudo"; fi
$run apt-get update -qq
$run apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
