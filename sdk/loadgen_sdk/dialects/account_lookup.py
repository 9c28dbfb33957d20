"""Finds the parser of a server's account of its time, by the name of the form, in the table of servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import WrongUse
from ..plugins import check_type
from .quirks import SERVERS
from .server_account import NO_ACCOUNT, UNKNOWN, AccountParser, ServerAccount


def server_account(timing: Mapping[str, Any]) -> ServerAccount:
    """Return the account in the timing of a response (`Completion.server_timing`), or NO_ACCOUNT.

    If there are several forms, each field has the value of the first form that knows it.
    """
    accounts = []
    for name, form in timing.items():
        if not isinstance(form, Mapping | str):
            continue
        parse = find_parser(name)
        account = NO_ACCOUNT if parse is None else parse(form)
        if account != NO_ACCOUNT:
            accounts.append(account)
    if not accounts:
        return NO_ACCOUNT
    return ServerAccount(*map(_first_known, *accounts)) if len(accounts) > 1 else accounts[0]


# Bounded, because the names of forms come from servers.
@lru_cache(maxsize=64)
def find_parser(form: str) -> AccountParser | None:
    """Return the parser of a form, or None. Plug-ins are loaded only for a form of no built-in server."""
    for row in SERVERS.own:
        if form in row.account:
            return row.account[form]
    for row in SERVERS.plugin_rows():
        if form in row.account:
            return _PluginParser(SERVERS.guard(row, row.account[form], check_type(ServerAccount)))
    return None


class _PluginParser:
    """A parser of a plug-in. If it fails, that is reported once, and the load goes on without accounts."""

    def __init__(self, parse: AccountParser) -> None:
        self._parse = parse
        self._reported: set[str] = set()

    def __call__(self, form: Mapping[str, Any] | str) -> ServerAccount:
        try:
            return self._parse(form)
        except WrongUse as error:
            if not self._reported:
                print(f"{error.what}: such answers have no account", file=sys.stderr)
            self._reported.add(error.what)
            return NO_ACCOUNT


def _first_known(*values: int) -> int:
    return next((value for value in values if value >= 0), UNKNOWN)
