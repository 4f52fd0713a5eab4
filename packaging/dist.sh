#!/usr/bin/env bash
# Makes build/dist/replayssm-VERSION-TARGET.tar.gz: what `make install` installs, in one folder that may lie anywhere. The same sources
# and compilers give the same bytes, whatever the folder, user, umask and time.
#
#   packaging/dist.sh VERSION           TARGET is the compiler's own
#   packaging/dist.sh VERSION 2.28      for glibc 2.28 or newer; TARGET ends with .2.28
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1
glibc=${2:-}
target=$(rustc -vV | sed -n 's/^host: //p')
name=replayssm-$version-$target${glibc:+.$glibc}
stage=build/dist/stage-$target${glibc:+.$glibc}
built=$PWD/build/release${glibc:+-glibc$glibc}

packaging/build.sh "$built" $glibc
touch "$built/release/libreplayssm.so"
rm -rf "$stage"
make --no-print-directory install LIB="$built/release/libreplayssm.so" DESTDIR="$PWD/$stage" PREFIX="/$name" LIBDIR=lib STRIP=strip
(
  cd "$stage"
  find "$name" -print0 | LC_ALL=C sort -z |
    tar --create --null --no-recursion --files-from=- --format=ustar --mtime="@${SOURCE_DATE_EPOCH:-315532800}" \
      --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --file=- |
    gzip --best --no-name >"../$name.tar.gz"
)
rm -rf "$stage"
echo "build/dist/$name.tar.gz"
