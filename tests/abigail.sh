#!/usr/bin/env bash
# Fetches abidw and abidiff (Debian's abigail-tools, 2 MB) into build/abigail, for tests/abi.rs where the machine has none, and prints the
# folder of their root. No root needed, nothing is installed: as tests/aarch64.sh does.
#
# Where that cannot be had, a line "skipped: abidiff because ..." says why, and the status is 0.
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD/build/abigail
root=$here/root
log=$here/log
mkdir -p "$here/apt/lists/partial" "$here/apt/archives/partial"
export LD_LIBRARY_PATH=$root/usr/lib/$(uname -m)-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

skip() {
  echo "skipped: abidiff because $1"
  exit 0
}
works() { "$root/usr/bin/abidw" --version >>"$log" 2>&1 && "$root/usr/bin/abidiff" --version >>"$log" 2>&1; }

# One at a time, should two tests call this.
exec 9>"$here/lock"
if command -v flock >/dev/null; then flock 9; fi
: >"$log"
if ! works; then
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || skip "apt-get and dpkg-deb are not installed"
  apt=(-o "Dir::State::lists=$here/apt/lists" -o "Dir::Cache=$here/apt" -o Debug::NoLocking=1 -o APT::Sandbox::User=
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
  apt-get "${apt[@]}" update >>"$log" 2>&1 || skip "apt-get update fails: $(grep -m1 '^E:' "$log" || tail -1 "$log")"
  apt-get "${apt[@]}" install --yes --download-only --reinstall --no-install-recommends abigail-tools >>"$log" 2>&1 ||
    skip "apt-get cannot fetch abigail-tools: $(grep '^E:' "$log" | tail -1)"
  for package in "$here"/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  rm -rf "$here/apt"
  works || skip "that of the packages does not run: $(tail -1 "$log")"
fi
echo "$root"
