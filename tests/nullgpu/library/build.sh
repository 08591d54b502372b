#!/bin/sh
# build.sh PYTHON OUT_DIRECTORY: compiles libnullgpu.so, and links to it by the names under which the driver is opened.
# CUDA's headers are those in the Triton wheel of PYTHON's environment, 3.7 or later, which has CUDA 13's: no CUDA
# toolkit is needed, only gcc. The library is whole at every moment, also while several build it.
set -eu
python=$1 out=$2
here=$(cd "$(dirname "$0")" && pwd)
headers=$("$python" -c "
from importlib.util import find_spec
print(find_spec('triton').submodule_search_locations[0] + '/backends/nvidia/include')")
mkdir -p "$out"
new=$(mktemp -d "$out/build.XXXXXX")
trap 'rm -rf "$new"' EXIT
"${CC:-gcc}" -O2 -Wall -Wextra -Wno-unused-parameter -fPIC -shared -I"$headers" "$here"/*.c \
    -o "$new/libnullgpu.so" -ldl -lpthread
for name in libcuda.so libcuda.so.1; do
    ln -s libnullgpu.so "$new/$name"
done
mv -f "$new/libcuda.so" "$new/libcuda.so.1" "$new/libnullgpu.so" "$out/"
