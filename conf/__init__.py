"""The presets as `pkg://mingpt_ddp.conf`, a search path of other Hydra applications.

Hydra imports this package when it searches there, which registers the schema that presets begin
with. In a checkout mingpt_ddp/conf is a link to this directory.
"""

from mingpt_ddp.config.compose import hydra_utils

__all__ = ["hydra_utils"]
