"""What an operator writes under `metadata.serving` of cluster.yaml: its schema, its reader, its reference page.

`load_config` is the one way in; a ServingConfig that exists is valid. Knows nothing of Ray's part of the file, which
Ray checks, and starts nothing.
"""

from __future__ import annotations

from cluster.config.load import describe_config, load_config, parse_config
from cluster.config.schema import (
    AdminSection,
    AuthSection,
    EngineSection,
    InternalTlsSection,
    MetricsSection,
    ModelSection,
    PlacementSection,
    RebalanceSection,
    RoleSection,
    RolesSection,
    RouterSection,
    ServingConfig,
    TlsSection,
    TransferSection,
)

__all__ = [
    "AdminSection",
    "AuthSection",
    "EngineSection",
    "InternalTlsSection",
    "MetricsSection",
    "ModelSection",
    "PlacementSection",
    "RebalanceSection",
    "RoleSection",
    "RolesSection",
    "RouterSection",
    "ServingConfig",
    "TlsSection",
    "TransferSection",
    "describe_config",
    "load_config",
    "parse_config",
]
