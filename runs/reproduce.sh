#!/usr/bin/env bash
# The tables of docs/results.md from one command: runs/reproduce.sh [--quick] [--data FOLDER] [runs/CONFIG.toml]
# A configuration with tables of variations is an ablation; docs/reproduce.md says more.
set -euo pipefail
cd "$(dirname "$0")/.."
make setup
config=runs/bench.toml
rest=()
for word in "$@"; do case "$word" in *.toml) config=$word ;; *) rest+=("$word") ;; esac; done
program=runs/reproduce.py
if grep -q '^\[\[tables\]\]' "$config"; then program=runs/ablation.py; fi
.venv/bin/python "$program" "$config" "${rest[@]}"
.venv/bin/python docs/make_pages.py
