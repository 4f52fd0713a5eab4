# Two commands: `make demo` and `make test`. Everything else is a part of them.

PREFIX ?= /usr/local
CARGO ?= cargo
BUILD := build

.PHONY: all demo test check header lib install uninstall clean

all: lib

lib:
	$(CARGO) build --release --locked

header:
	REPLAYSSM_WRITE_HEADER=1 $(CARGO) test --locked --test header

check:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets --all-features -- -D warnings

test: check
	$(CARGO) test --locked

clean:
	rm -rf $(BUILD) target
