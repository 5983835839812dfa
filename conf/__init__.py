"""The presets, as a package. Other Hydra applications add `pkg://mingpt_ddp.conf` to search paths.

Hydra imports this package when it looks for presets in it. The import registers the schema. Each
preset begins with the defaults of its group in the schema. In a checkout, mingpt_ddp/conf is a link
to this directory.
"""

from mingpt_ddp.config.compose import hydra_utils

__all__ = ["hydra_utils"]
