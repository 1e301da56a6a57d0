# Everything a person needs on a fresh machine with Python >= 3.11 and pip:
#   make demo       train DeepSeek-V3 nano in BF16 and MXFP8 on this machine, print the verdict and where the report is
#   make test       every test
#   make lab        JupyterLab on the notebooks
#   make site       executed notebooks, README and guides as a web site in a folder: build/site/html/index.html
#   make dist       the sdist, and the wheel from it, in a folder: dist
#   make upgrade    the newest versions that pyproject.toml allows, into constraints.txt; then run the tests
#   make rendered   executed copies of all notebooks, before a release, for readers without Jupyter; needs a Chromium;
#                   12 minutes, of which 06 trains for 7; what it finished stays in runs/ and is not trained again
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NOTEBOOK := 06_compare_convergence
WORKERS ?= 2

.PHONY: demo test lab site rendered lint dist upgrade clean
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
	$(BIN)/python site/render.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# What is published is built by packages with hashes alone, in an environment that has nothing else.
dist:
	$(PYTHON) -m venv --clear build/dist
	sed '/^# core/,$$d' constraints.txt > build/dist/build.txt
	build/dist/bin/python -m pip install --quiet --require-hashes --requirement build/dist/build.txt
	build/dist/bin/python -m build --no-isolation

# uv resolves for every Python and platform at once. A part leaves out what those before it install everywhere.
NEW = $(VENV)/constraints.txt
resolve = $(BIN)/uv pip compile pyproject.toml --quiet --no-header --no-annotate --universal --python-version 3.11 --generate-hashes
rest = $(resolve) --constraint $(NEW) $$(sed -nE 's/^([a-z0-9-]+)==[^ ]+ .$$/--no-emit-package \1/p' $(NEW))
upgrade: $(BIN)/python
	$(BIN)/python -m pip install --quiet 'uv>=0.9,<1'
	sed '/^# build/,$$d' constraints.txt > $(NEW)
	{ echo '# build' && $(resolve) --group build; } >> $(NEW)
	{ echo '# core' && $(rest); } >> $(NEW)
	{ echo '# lab' && $(rest) --extra lab; } >> $(NEW)
	{ echo '# dev' && $(rest) --extra lab --extra dev; } >> $(NEW)
	{ echo '# site' && $(rest) --extra lab --extra dev --extra site; } >> $(NEW)
	mv $(NEW) constraints.txt

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"moelab needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}. Use make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of packages, which are the parts of constraints.txt before the one that is named. Only what has a
# hash is installed then; moelab itself is a folder and has none, so it follows alone.
define install_before
	sed '/^. $(1)$$/,$$d' constraints.txt > $@.txt
	$(BIN)/python -m pip install --quiet --require-hashes --requirement $@.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
endef

$(VENV)/.installed-core: pyproject.toml constraints.txt | $(BIN)/python
	$(call install_before,lab)

$(VENV)/.installed-lab: pyproject.toml constraints.txt | $(BIN)/python
	$(call install_before,dev)
	touch $(VENV)/.installed-core

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(call install_before,site)
	touch $(VENV)/.installed-core $(VENV)/.installed-lab

$(VENV)/.installed-site: pyproject.toml constraints.txt | $(BIN)/python
	$(call install_before,nothing)
	touch $(VENV)/.installed-core $(VENV)/.installed-lab $(VENV)/.installed-dev
