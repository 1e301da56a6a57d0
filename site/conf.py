"""Sphinx configuration of the site; ``build_site.py`` copies it beside the pages.

The site is what Jupyter Book 1 builds: MyST-NB pages in its theme. Jupyter Book 2 (mystmd) downloads its theme while it
builds, and its pages need a web server. These are read from a folder and ask nothing of the network.
"""

import html

from docutils import nodes
from latex2mathml.converter import convert

project = "moelab"
author = "The moelab authors"
extensions = ["myst_nb"]
nb_execution_mode = "off"  # build_site.py runs the notebooks, with their profiles
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
exclude_patterns = ["static"]

html_theme = "sphinx_book_theme"
html_title = "moelab"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [(name, {"defer": "defer"}) for name in ("painted.js", "figures.js")]
html_context = {"default_mode": "auto"}  # light or dark as the reader's system
html_copy_source = False
html_use_index = False
html_show_search_summary = False  # summaries are fetched, which a browser refuses to a page of a folder
html_last_updated_fmt = "%Y-%m-%d"
html_theme_options = {
    "navbar_persistent": [],  # a second search field above the page
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def _formula(translator, node):
    """A formula as MathML, which browsers draw by themselves; MathJax would come from the network."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(
        f"<span class='math' title='{html.escape(node.astext())}'>{convert(node.astext(), display=display)}</span>"
    )
    raise nodes.SkipNode


def setup(app):
    """Let formulas be MathML."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.config.html_math_renderer = "mathml"
