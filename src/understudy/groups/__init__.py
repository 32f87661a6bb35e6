"""KV cache groups: from the layers of a model to groups, block sizes and the number of blocks, as vLLM plans them."""

from understudy.groups.layer import Layer
from understudy.groups.of_model import groups_of_model, layers_of_model
from understudy.groups.plan import Group, GroupPlan, plan_groups

__all__ = ["Group", "GroupPlan", "Layer", "groups_of_model", "layers_of_model", "plan_groups"]
