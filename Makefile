# Two commands: `make demo` and `make test`. Everything else is a part of them.

PREFIX ?= /usr/local
CARGO ?= cargo
BUILD := $(CURDIR)/build
CMAKE_VERSION := 3.31.6

# CMake from the system, or pinned from PyPI into build/.
CMAKE := $(shell command -v cmake || echo $(BUILD)/venv/bin/cmake)

.PHONY: all lib demo test check header breaks install uninstall clean

all: lib

lib:
	$(CARGO) build --release --locked

$(BUILD)/venv/bin/cmake:
	python3 -m venv $(BUILD)/venv
	$(BUILD)/venv/bin/pip install --quiet --disable-pip-version-check cmake==$(CMAKE_VERSION)

demo: $(filter $(BUILD)/%,$(CMAKE))
	$(MAKE) --no-print-directory install PREFIX=$(BUILD)/install DESTDIR=
	$(CMAKE) -S examples-cpp -B $(BUILD)/examples -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=$(BUILD)/install
	$(CMAKE) --build $(BUILD)/examples
	$(BUILD)/examples/selective_state_update
	$(BUILD)/examples/demo --model examples-cpp/demo/model

header:
	REPLAYSSM_WRITE_HEADER=1 $(CARGO) test --locked --test header

check:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets --all-features -- -D warnings
	tests/breaks.sh --check

test: check
	tests/run.sh

# Shows that the exactness tests can fail; about ten minutes.
breaks:
	tests/breaks.sh

# ---- Installing: DESTDIR and PREFIX as everywhere; everything installed may be moved as a whole. Linux. ----

VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' Cargo.toml | head -1)
# The soname's rule: 0.MINOR before 1.0, MAJOR after.
SOVERSION := $(shell echo $(VERSION) | sed -e 's/^\(0\.[0-9]*\)\..*/\1/' -e t -e 's/\..*//')
CARGO_TARGET ?= $(or $(CARGO_TARGET_DIR),target)
DEST = $(DESTDIR)$(PREFIX)
DOC = $(DEST)/share/doc/replayssm
INSTALLED_DOCS := $(wildcard LICENSE-MIT LICENSE-APACHE README.md CHANGELOG.md)
FILL = sed -e 's/@VERSION@/$(VERSION)/g' -e 's/@SOVERSION@/$(SOVERSION)/g'

install:
	$(CARGO) build --release --locked --lib --target-dir '$(CARGO_TARGET)'
	install -d '$(DEST)/include' '$(DEST)/lib/cmake/replayssm' '$(DEST)/lib/pkgconfig' '$(DOC)'
	install -m 644 $(wildcard include/replayssm.h include/replayssm.hpp) '$(DEST)/include/'
	install -m 755 '$(CARGO_TARGET)/release/libreplayssm.so' '$(DEST)/lib/libreplayssm.so.$(VERSION)'
	ln -sf libreplayssm.so.$(VERSION) '$(DEST)/lib/libreplayssm.so.$(SOVERSION)'
	ln -sf libreplayssm.so.$(SOVERSION) '$(DEST)/lib/libreplayssm.so'
	$(FILL) cmake/replayssm-config.cmake.in >'$(DEST)/lib/cmake/replayssm/replayssm-config.cmake'
	$(FILL) cmake/replayssm-config-version.cmake.in >'$(DEST)/lib/cmake/replayssm/replayssm-config-version.cmake'
	$(FILL) cmake/replayssm.pc.in >'$(DEST)/lib/pkgconfig/replayssm.pc'
	$(if $(INSTALLED_DOCS),install -m 644 $(INSTALLED_DOCS) '$(DOC)/')

uninstall:
	rm -f '$(DEST)/include/replayssm.h' '$(DEST)/include/replayssm.hpp' '$(DEST)/lib/pkgconfig/replayssm.pc'
	rm -f '$(DEST)/lib/libreplayssm.so' '$(DEST)/lib/libreplayssm.so.$(SOVERSION)' '$(DEST)/lib/libreplayssm.so.$(VERSION)'
	rm -rf '$(DEST)/lib/cmake/replayssm' '$(DOC)'

clean:
	rm -rf $(BUILD) target
