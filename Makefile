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

clean:
	rm -rf $(BUILD) target
