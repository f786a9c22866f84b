"""The vocabulary of modelquirks and its plugin registry.

Imports neither torch nor the planner. Names are looked up when first used, so that a program
which needs a family does not pay for the plugin machinery.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelquirks.quirks.family import Family, group, indices_of, show, template_of
    from modelquirks.quirks.hookspecs import (
        GROUP,
        LibraryPlugin,
        ModelPlugin,
        OpenPlugin,
        RecordsPlugin,
        SchemesPlugin,
        hookimpl,
    )
    from modelquirks.quirks.library import LibraryRules, Named
    from modelquirks.quirks.nodetypes import infer, settings_of
    from modelquirks.quirks.pattern import Binding, Pattern, PatternError, rename
    from modelquirks.quirks.recipe import (
        Cast,
        Chunk,
        Concat,
        Dequantize,
        Interleave,
        Join,
        Merge,
        Node,
        Opaque,
        Part,
        Peek,
        Permute,
        RecipeError,
        Region,
        Reshape,
        Scheme,
        Select,
        Setting,
        Settings,
        Slice,
        Source,
        Split,
        Stack,
        TensorType,
        Transpose,
        View,
        children,
        mapped,
        nodes,
        on_children,
        sources,
    )
    from modelquirks.quirks.recipe_json import from_json, to_json
    from modelquirks.quirks.record import (
        LIBRARIES,
        ROLES,
        Alias,
        Convert,
        Expected,
        Match,
        ModelQuirks,
        Pack,
        Parallel,
        RecordError,
        Refusal,
        Role,
        Tie,
    )
    from modelquirks.quirks.registry import (
        ModelBuildError,
        Origin,
        PluginError,
        PluginInfo,
        Registered,
        Registry,
    )

__all__ = [
    "GROUP",
    "LIBRARIES",
    "ROLES",
    "Alias",
    "Binding",
    "Cast",
    "Chunk",
    "Concat",
    "Convert",
    "Dequantize",
    "Expected",
    "Family",
    "Interleave",
    "Join",
    "LibraryPlugin",
    "LibraryRules",
    "Match",
    "Merge",
    "ModelBuildError",
    "ModelPlugin",
    "ModelQuirks",
    "Named",
    "Node",
    "Opaque",
    "OpenPlugin",
    "Origin",
    "Pack",
    "Parallel",
    "Part",
    "Pattern",
    "PatternError",
    "Peek",
    "Permute",
    "PluginError",
    "PluginInfo",
    "RecipeError",
    "RecordError",
    "RecordsPlugin",
    "Refusal",
    "Region",
    "Registered",
    "Registry",
    "Reshape",
    "Role",
    "Scheme",
    "SchemesPlugin",
    "Select",
    "Setting",
    "Settings",
    "Slice",
    "Source",
    "Split",
    "Stack",
    "TensorType",
    "Tie",
    "Transpose",
    "View",
    "children",
    "from_json",
    "group",
    "hookimpl",
    "indices_of",
    "infer",
    "mapped",
    "nodes",
    "on_children",
    "rename",
    "settings_of",
    "show",
    "sources",
    "template_of",
    "to_json",
]

if not TYPE_CHECKING:  # a type checker would take any name for granted
    _MODULES = (
        "family",
        "pattern",
        "recipe",
        "nodetypes",
        "recipe_json",
        "record",
        "hookspecs",
        "library",
        "registry",
    )  # cheap first

    def __getattr__(name: str) -> object:
        if name in __all__:
            for module in map(import_module, (f"{__name__}.{m}" for m in _MODULES)):
                if name in module.__all__:
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
