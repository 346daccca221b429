#!/bin/sh
# Makes the virtual environment VENV with PYTHON, or leaves a good one alone: deploy/venv.sh VENV PYTHON [asked].
# "asked" says that the user named PYTHON: a good environment of another version is then replaced as well.
set -eu
venv=$1 python=$2 asked=${3:-}
minor=$(sed -n 's/^requires-python = ">=3\.\([0-9]*\)"$/\1/p' pyproject.toml)

# The version of the Python $1, such as 3.12; nothing where it does not run.
version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

fits() {
    case $1 in 3.*) [ "${1#3.}" -ge "$minor" ] ;; *) false ;; esac
}

has=$(version "$venv/bin/python")
if fits "$has" && { [ -z "$asked" ] || [ "$has" = "$(version "$python")" ]; }; then
    exit 0
fi
found=$(version "$python")
if ! fits "$found"; then
    better=python3.12
    for name in python3.14 python3.13 python3.12 python3.11; do
        if fits "$(version "$name")"; then better=$name; break; fi
    done
    echo "Slipstream needs Python 3.$minor or newer; found ${found:-none} as $python; try PYTHON=$better" >&2
    exit 1
fi
if [ -e "$venv" ]; then
    echo "replacing $venv, which is not of Python $found"
    rm -rf "$venv"
fi
if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
    rm -rf "$venv"
    echo "$python cannot make virtual environments; install its venv module (Debian: apt install python$found-venv)" >&2
    exit 1
fi
