# A thin caller of make.py, which does all the work in standard-library Python: `python3 make.py test` is the same.
PYTHON ?= python3

.PHONY: run test lint setup lock
run test lint setup lock:
	@$(PYTHON) make.py $@ $(ARGS)
