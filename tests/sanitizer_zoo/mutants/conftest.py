"""The scripts are run by the tests, never imported while tests are collected."""

from __future__ import annotations

collect_ignore_glob = ["scripts/*", "scripts_later/*"]
