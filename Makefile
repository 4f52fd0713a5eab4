# Two commands: `make demo` and `make test`. Everything else is a part of them, or measures.

PREFIX ?= /usr/local
CARGO ?= cargo
BUILD := $(CURDIR)/build
NVRTC_VERSION := $(shell sed -n 's/^nvidia-cuda-nvrtc-cu12==\([^ ]*\).*/\1/p' packaging/nvrtc.txt)

# CMake from the system, or pinned by version and hash from PyPI into build/.
CMAKE := $(shell command -v cmake || echo $(BUILD)/venv/bin/cmake)
# Where there is none, and Python cannot install packages either (Debian's without python3-venv), the examples are compiled without.
WITHOUT_CMAKE := $(shell command -v cmake >/dev/null || python3 -c 'import ensurepip' 2>/dev/null || echo yes)

.PHONY: FORCE all lib lib-glibc228 dist demo demo-quick examples test check header baseline breaks bench emulated aarch64 fuzz install uninstall clean

all: lib

# The compiler of the CUDA kernels, pinned by version and hash from PyPI into build/; where Python cannot install packages, cargo looks
# for a CUDA toolkit and else builds for the CPU alone, and says so. It is not needed with REPLAYSSM_CUDA=off, or where REPLAYSSM_NVRTC
# names one.
WITHOUT_PIP := $(shell python3 -c 'import ensurepip' 2>/dev/null || echo yes)
NVRTC := $(if $(or $(WITHOUT_PIP),$(REPLAYSSM_NVRTC),$(filter off,$(REPLAYSSM_CUDA)),$(filter-out x86_64,$(shell uname -m))),,$(BUILD)/nvrtc/$(NVRTC_VERSION))
ifneq ($(NVRTC),)
$(NVRTC):
	{ python3 -m venv $(BUILD)/nvrtc/venv && \
	  $(BUILD)/nvrtc/venv/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
	    -d $(BUILD)/nvrtc/wheel -r packaging/nvrtc.txt && \
	  (cd $(BUILD)/nvrtc && python3 -m zipfile -e wheel/*.whl .) && \
	  rm -rf $(BUILD)/nvrtc/wheel $(BUILD)/nvrtc/venv $(BUILD)/nvrtc/nvidia/cuda_nvrtc/lib/*.alt.so* && touch $@ build.rs; } || \
	{ echo 'NVRTC cannot be fetched: the kernels are built by that of a CUDA toolkit, or left out'; \
	  test '$(REPLAYSSM_CUDA)' != require; }
endif

# Kernels of a library that serves other machines are for all architectures, a few minutes' work. Demonstrations and tests need those of
# this machine's GPU, or of any one to see that they compile.
LOCAL_ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | sed 's/\..*/0/')
demo demo-quick examples test check header baseline breaks bench emulated: export REPLAYSSM_CUDA_ARCHS ?= $(or $(filter 80 90 100 120,$(LOCAL_ARCH)),90)
# What the library was last built with: a change builds it again.
$(BUILD)/kernels-for: FORCE
	@mkdir -p $(BUILD)
	@echo '$(REPLAYSSM_CUDA) $(REPLAYSSM_CUDA_ARCHS) $(REPLAYSSM_NVRTC)' | cmp -s - $@ || echo '$(REPLAYSSM_CUDA) $(REPLAYSSM_CUDA_ARCHS) $(REPLAYSSM_NVRTC)' >$@
FORCE:

# The library is a file like any other: nobody needs cargo who has an up-to-date one, as `sudo make install` does.
CARGO_TARGET ?= $(or $(CARGO_TARGET_DIR),target)
LIB := $(CARGO_TARGET)/release/libreplayssm.so
lib: $(LIB)
$(LIB): Cargo.toml Cargo.lock build.rs rust-toolchain.toml $(shell find src build-support -name '*.rs') $(shell find cuda -type f) $(BUILD)/kernels-for | $(NVRTC)
	@$(if $(filter off,$(REPLAYSSM_CUDA)),,echo 'The kernels for CUDA are compiled with the library; cargo says nothing meanwhile, for minutes. REPLAYSSM_CUDA=off leaves them out.')
	$(CARGO) build --release --locked --lib --target-dir '$(CARGO_TARGET)'
	@touch '$@'

$(BUILD)/venv/bin/cmake:
	python3 -m venv $(BUILD)/venv
	$(BUILD)/venv/bin/pip install --quiet --disable-pip-version-check --only-binary=:all: --require-hashes -r packaging/cmake.txt

examples: $(if $(WITHOUT_CMAKE),,$(filter $(BUILD)/%,$(CMAKE)))
	$(MAKE) --no-print-directory install PREFIX=$(BUILD)/install DESTDIR= LIBDIR=lib
ifeq ($(WITHOUT_CMAKE),yes)
	mkdir -p $(BUILD)/examples
	$(EXAMPLE) examples-cpp/selective_state_update.cpp $(LINKED) -o $(BUILD)/examples/selective_state_update
	$(EXAMPLE) examples-cpp/adapters/*.cpp examples-cpp/adapters/*/*.cpp $(LINKED) -o $(BUILD)/examples/adapters
	(printf 'R"CUDA('; cat examples-cpp/demo/cuda/params.h examples-cpp/demo/cuda/kernels.cu; echo ')CUDA"') >$(BUILD)/examples/kernels.inc
	$(EXAMPLE) -ffp-contract=off -pthread -I$(BUILD)/examples -DDEMO_MODEL_FOLDER='"$(CURDIR)/examples-cpp/demo/model"' \
		-DDEMO_NVRTC='"$(DEMO_NVRTC)"' examples-cpp/demo/*.cpp examples-cpp/demo/cuda/*.cpp $(LINKED) -ldl -o $(BUILD)/examples/demo
else
	$(CMAKE) -S examples-cpp -B $(BUILD)/examples -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=$(BUILD)/install -DDEMO_NVRTC='$(DEMO_NVRTC)'
	$(CMAKE) --build $(BUILD)/examples
endif
	$(BUILD)/examples/selective_state_update
	$(BUILD)/examples/adapters

# Where the demo finds the compiler of its own kernels, on a machine with a GPU; empty: where the system has it.
DEMO_NVRTC = $(or $(REPLAYSSM_NVRTC),$(if $(NVRTC),$(BUILD)/nvrtc/nvidia/cuda_nvrtc/lib/libnvrtc.so.12))

# As examples-cpp/CMakeLists.txt has it.
EXAMPLE = $(CXX) -std=c++17 -O3 -DNDEBUG -Wall -Wextra -Wpedantic -Werror -I$(BUILD)/install/include
LINKED = -L$(BUILD)/install/lib -Wl,-rpath,$(BUILD)/install/lib -lreplayssm

demo: examples
	$(BUILD)/examples/demo --model examples-cpp/demo/model

# The same checks in seconds, and that they fail when they should: with a ring row overwritten, texts differ.
demo-quick: examples
	$(BUILD)/examples/demo --quick --model examples-cpp/demo/model
	$(BUILD)/examples/demo --quick --break --model examples-cpp/demo/model >$(BUILD)/broken.txt; test $$? = 1
	grep 'RESULT demo identical=0' $(BUILD)/broken.txt

header: $(NVRTC)
	REPLAYSSM_WRITE_HEADER=1 $(CARGO) test --locked --test header

# Keeps the interface of this version in abi/, for later ones to be compared with.
baseline: $(NVRTC)
	REPLAYSSM_WRITE_BASELINE=1 $(CARGO) test --locked --test abi a_kept_interface_is_written

check: $(NVRTC)
	$(CARGO) fmt --check
	$(CARGO) fmt --check --manifest-path fuzz/Cargo.toml
	$(CARGO) clippy --locked --all-targets --all-features -- -D warnings
	tests/breaks.sh --check
	tests/gpu/breaks.sh --check

test: check
	tests/run.sh

# Shows that the exactness tests can fail; a few minutes.
breaks: $(NVRTC)
	tests/breaks.sh

# Times of steps on this machine's GPU, or on its processor, for all shapes: some minutes. BENCH is other options of `kernel`, as '--batch 1,8'.
BENCH ?= --all
bench: $(NVRTC)
	@mkdir -p $(BUILD)
	$(CARGO) run --release --locked --features bench --bin replayssm-bench -- kernel $(BENCH) --json $(BUILD)/bench.json --svg $(BUILD)/bench.svg

# A part of `make test`: the CUDA backend on a device that is not there.
emulated: $(NVRTC)
	tests/emulated/run.sh

# A part of `make test`: builds for aarch64, runs byte tests under qemu.
aarch64:
	tests/aarch64.sh

# A part of `make test`, longer: `make fuzz SECONDS=3600` fuzzes each target for so long, two at a time.
SECONDS ?= 60
fuzz:
	tests/fuzz.sh $(SECONDS)

# ---- Installing: DESTDIR and PREFIX as everywhere; everything installed may be moved as a whole. Linux. ----
#
#   LIBDIR   where the library goes below PREFIX: lib, lib64, lib/x86_64-linux-gnu
#   STRIP    what takes the debug information out of it; 0 leaves it in

LIBDIR ?= lib
STRIP ?= strip
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' Cargo.toml | head -1)
# The soname's rule: 0.MINOR before 1.0, MAJOR after.
SOVERSION := $(shell echo $(VERSION) | sed -e 's/^\(0\.[0-9]*\)\..*/\1/' -e t -e 's/\..*//')
DEST = $(DESTDIR)$(PREFIX)
LIBS = $(DEST)/$(LIBDIR)
DOC = $(DEST)/share/doc/replayssm
INSTALLED_DOCS := $(wildcard LICENSE-MIT LICENSE-APACHE THIRD_PARTY.txt README.md CHANGELOG.md)
# From LIBDIR back to PREFIX: lib/x86_64-linux-gnu gives ../..
UP = $(shell echo '$(LIBDIR)' | sed -e 's|[^/][^/]*|..|g')
FILL = sed -e 's|@VERSION@|$(VERSION)|g' -e 's|@SOVERSION@|$(SOVERSION)|g' -e 's|@LIBDIR@|$(LIBDIR)|g' -e 's|@UP@|$(UP)|g'

install: $(LIB)
	$(if $(filter /%,$(LIBDIR)),$(error LIBDIR is '$(LIBDIR)'; expected a path below PREFIX, as lib64))
	install -d '$(DEST)/include' '$(LIBS)/cmake/replayssm' '$(LIBS)/pkgconfig' '$(DOC)'
	install -m 644 $(wildcard include/replayssm.h include/replayssm.hpp) '$(DEST)/include/'
	install -m 755 '$(LIB)' '$(LIBS)/libreplayssm.so.$(VERSION)'
	$(if $(filter 0,$(STRIP)),,$(STRIP) --strip-debug '$(LIBS)/libreplayssm.so.$(VERSION)')
	ln -sf libreplayssm.so.$(VERSION) '$(LIBS)/libreplayssm.so.$(SOVERSION)'
	ln -sf libreplayssm.so.$(SOVERSION) '$(LIBS)/libreplayssm.so'
	$(FILL) cmake/replayssm-config.cmake.in >'$(LIBS)/cmake/replayssm/replayssm-config.cmake'
	$(FILL) cmake/replayssm-config-version.cmake.in >'$(LIBS)/cmake/replayssm/replayssm-config-version.cmake'
	$(FILL) cmake/replayssm.pc.in >'$(LIBS)/pkgconfig/replayssm.pc'
	$(if $(INSTALLED_DOCS),install -m 644 $(INSTALLED_DOCS) '$(DOC)/')

uninstall:
	rm -f '$(DEST)/include/replayssm.h' '$(DEST)/include/replayssm.hpp' '$(LIBS)/pkgconfig/replayssm.pc'
	rm -f '$(LIBS)/libreplayssm.so' '$(LIBS)/libreplayssm.so.$(SOVERSION)' '$(LIBS)/libreplayssm.so.$(VERSION)'
	rm -rf '$(LIBS)/cmake/replayssm' '$(DOC)'

# ---- Libraries for other machines ----

# For systems older than this one: glibc 2.28 or newer. Install it with `make install LIB=build/glibc2.28/release/libreplayssm.so`.
lib-glibc228:
	packaging/build.sh $(BUILD)/glibc2.28 2.28
	@touch $(BUILD)/glibc2.28/release/libreplayssm.so

# build/dist/replayssm-VERSION-TARGET.tar.gz; with GLIBC=2.28 for such systems.
dist:
	packaging/dist.sh $(VERSION) $(GLIBC)

clean:
	rm -rf $(BUILD) target
