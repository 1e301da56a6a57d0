# Everything a person needs on a fresh machine with Python >= 3.11 and pip:
#   make demo       train DeepSeek-V3 nano in BF16 and MXFP8 on this CPU, print the verdict and where the report is
#   make test       every test
#   make lab        JupyterLab on the notebooks
#   make site       executed notebooks, README and guides as a web site in a folder: build/site/html/index.html
#   make rendered   executed copies of all notebooks, before a release, for readers without Jupyter; needs a Chromium
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NOTEBOOK := 06_compare_convergence
WORKERS ?= 2

.PHONY: demo test lab site rendered lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-core
	$(BIN)/python -m moelab.notebooks notebooks/$(NOTEBOOK).ipynb runs/$(NOTEBOOK)/notebook.ipynb -f papermill_params/$(NOTEBOOK)/cpu.yaml
	@echo "report: $(CURDIR)/runs/$(NOTEBOOK)/report.html"

# One process trains, the others run the rest meanwhile; see tests/conftest.py.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_FLAGS)

lab: $(VENV)/.installed-lab
	$(BIN)/jupyter lab --notebook-dir=. notebooks/00_start_here.ipynb

site: $(VENV)/.installed-site
	$(BIN)/python site/build_site.py --workers $(WORKERS) $(SITE_FLAGS)

rendered: $(VENV)/.installed-dev
	$(BIN)/python -m moelab.notebooks.render

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"moelab needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}. Use make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of packages; one is renewed when pyproject.toml changes.
$(VENV)/.installed-core: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-lab: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[lab]'
	touch $@ $(VENV)/.installed-core

$(VENV)/.installed-site: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[lab,site]'
	touch $@ $(VENV)/.installed-core $(VENV)/.installed-lab

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[lab,dev]'
	touch $@ $(VENV)/.installed-core $(VENV)/.installed-lab
