#!/usr/bin/env bash
# The tables of docs/results.md from one command: runs/reproduce.sh [--quick] [--data FOLDER] [runs/CONFIG.toml]
set -euo pipefail
cd "$(dirname "$0")/.."
make setup
config=runs/bench.toml
rest=()
for word in "$@"; do case "$word" in *.toml) config=$word ;; *) rest+=("$word") ;; esac; done
.venv/bin/python runs/reproduce.py "$config" "${rest[@]}"
.venv/bin/python docs/make_pages.py
