"""The real nginx, from the operating system. Without it tests are skipped, or fail where FEDCDP_REQUIRE_NGINX is set."""

from __future__ import annotations

import os
import shutil

import pytest


def require_nginx() -> None:
    if shutil.which("nginx") is None:
        message = "nginx is not installed (apt-get install nginx-light)"
        pytest.fail(message) if os.environ.get("FEDCDP_REQUIRE_NGINX") else pytest.skip(message)
