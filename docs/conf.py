"""The documentation site: ``sphinx-build -W -n docs docs/_build``."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_safe_ckpt

project = "keras_safe_ckpt"
author = "The keras_safe_ckpt authors"
copyright = author
version = release = keras_safe_ckpt.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"keras_safe_ckpt {release}"
# Without the sources beside the pages: they are in the repository.
html_copy_source = False
html_show_sourcelink = False

# In docstrings `LockManager` is a link to what is documented under that name.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Hooks without words of their own are those of Keras, which documents them.
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False

# Links from one page to a heading of another one, as code hosts make their anchors.
myst_heading_anchors = 3

# With `-n`, what is of this library must be documented here. Others cannot be linked to without
# their inventories, which would have to be fetched: types of others in signatures, and the names
# of others in docstrings.
nitpick_ignore_regex = [
    ("py:(class|data|exc)", r"(?!keras_safe_ckpt\b).*"),
    ("py:obj", r"(datetime|keras|str|tf|time)\.[\w.]+|fit|evaluate|predict"),
]
