"""How ``make docs`` builds the site: the pages as they are, and the API from the docstrings.

The source folder is the repository's root, so that links between README.md, docs/ and the examples
are the same on the site as in the repository.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from lightning_elastic_zero import __version__

ROOT = Path(__file__).resolve().parents[1]

project = "lightning_elastic_zero"
author = "The lightning-elastic-zero authors"
project_copyright = author
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
# Not walked at all: environments, caches, tests. The description is the README's for an index.
exclude_patterns = [".*", "build", "dist", "tests", "lightning_elastic_zero", "docs/description.md"]
root_doc = "docs/index"
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "sidebar_width": "260px"}
html_copy_source = False
pygments_style = "friendly"

myst_heading_anchors = 4
# Names in other libraries are no links, and there is no network in a build.
nitpicky = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # They stand in the signatures, or in the sections of the docstrings.
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


class FolderLinks(SphinxPostTransform):
    """Links to folders are right in the repository, and lead nowhere on the site: text is left."""

    default_priority = 4  # Before MyST's own, which warns of them.

    def run(self, **_: object) -> None:
        """Replace them."""
        for link in list(self.document.findall(nodes.Element)):
            target = unquote(link.get("reftarget", "")).partition("#")[0]
            if link.get("reftype") == "myst" and target:
                folder = (ROOT / self.env.docname).parent / target
                if folder.is_dir():
                    link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    """Add what is ours."""
    app.add_post_transform(FolderLinks)
