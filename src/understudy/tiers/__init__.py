"""KV tiers below the GPU and the links between them."""

from understudy._core import Links, LinkUsage
from understudy.tiers.dynamo import take_dynamo_names
from understudy.tiers.model_shape import ModelShape
from understudy.tiers.native import to_core
from understudy.tiers.plan import PlannedLink, PlannedTier, TierPlan
from understudy.tiers.policy import OffloadPolicy
from understudy.tiers.settings import LinkSettings, OffloadSettings, TiersConfig, TierSettings

__all__ = [
    "LinkSettings",
    "LinkUsage",
    "Links",
    "ModelShape",
    "OffloadPolicy",
    "OffloadSettings",
    "PlannedLink",
    "PlannedTier",
    "TierPlan",
    "TierSettings",
    "TiersConfig",
    "take_dynamo_names",
    "to_core",
]
