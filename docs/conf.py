"""Configuration of ``make docs``: the pages, and the references of the API and command line.

The source folder is the root of the repository, so links between README.md, docs/ and the examples
are the same on the site and in the repository.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

from lightning_elastic_zero import __version__
from lightning_elastic_zero.cli import main

ROOT = Path(__file__).resolve().parents[1]

project = "lightning_elastic_zero"
author = "The lightning-elastic-zero authors"
project_copyright = author
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
# Environments, caches, tests; and the description for a package index, which repeats the README.
exclude_patterns = [".*", "build", "dist", "tests", "lightning_elastic_zero", "docs/description.md"]
root_doc = "docs/index"
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "sidebar_width": "260px"}
html_copy_source = False
pygments_style = "friendly"

myst_heading_anchors = 4
# Names of other libraries are not linked: a build has no network.
nitpicky = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False


class FolderLinks(SphinxPostTransform):
    """Replaces links to folders, which exist in the repository but not on the site, by text."""

    default_priority = 4  # before MyST's own transform, which warns about such links

    def run(self, **_: object) -> None:
        """Replace the links of one page."""
        for link in list(self.document.findall(nodes.Element)):
            target = unquote(link.get("reftarget", "")).partition("#")[0]
            if link.get("reftype") == "myst" and target:
                folder = (ROOT / self.env.docname).parent / target
                if folder.is_dir():
                    link.replace_self(link.children)


class CommandLineHelp(SphinxDirective):
    """``.. cli-help:: verb``: a section with the help text of one verb, or of the command."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the section."""
        os.environ["COLUMNS"] = "100"
        output = io.StringIO()
        with redirect_stdout(output), suppress(SystemExit):  # argparse exits after its help
            main([*self.arguments, "--help"])
        title = " ".join(["lightning-elastic-zero", *self.arguments])
        section = nodes.section(ids=[nodes.make_id(title)])
        text = output.getvalue()
        section += [nodes.title(text=title), nodes.literal_block(text, text, language="none")]
        return [section]


def keep_colons(_app: Sphinx, what: str, *more: Any) -> None:
    """Stop napoleon from taking an attribute's text before the first colon as its type."""
    if what in {"attribute", "property"}:
        lines: list[str] = more[-1]
        lines[:0] = ["..", ""]  # an empty comment, which has no colon


def shorten_defaults(_app: Sphinx, *more: Any) -> tuple[str | None, str | None]:
    """Write ``...`` for default values that are objects, which Sphinx cannot parse."""
    signature, returned = more[-2:]
    return signature and re.sub(r"<.*?>+(?=[,)])", "...", signature), returned


def setup(app: Sphinx) -> None:
    """Add the listeners, the transform and the directive."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", shorten_defaults)
    app.add_post_transform(FolderLinks)
    app.add_directive("cli-help", CommandLineHelp)
