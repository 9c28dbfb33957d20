"""Makes every Python process that finds this file resemble one on macOS.

`tests/test_platforms.py` adds this folder to PYTHONPATH, so that the commands that it runs and all
their child processes lack what Linux has and macOS does not: modules, functions, constants, and the
file systems /proc and /sys. The compiled modules, which are built on Linux only, are switched off.
"""

import errno
import fcntl
import os
import select
import selectors
import socket
import sys
import sysconfig
import types

LINUX_ONLY = {
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ"),
    os: (
        "copy_file_range",
        "eventfd",
        "memfd_create",
        "pidfd_open",
        "pipe2",
        "posix_fadvise",
        "posix_fallocate",
        "prlimit",
        "sched_getaffinity",
        "sched_setaffinity",
        "splice",
        "timerfd_create",
    ),
    select: ("epoll", "EPOLLIN", "EPOLLOUT", "EPOLLERR", "EPOLLHUP", "EPOLLET", "EPOLLRDHUP"),
    selectors: ("EpollSelector",),
    socket: ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_TIMESTAMPNS", "TCP_QUICKACK", "MSG_ERRQUEUE"),
}
LINUX_FILE_SYSTEMS = ("/proc/", "/sys/")
EVENTS_WITH_PATH = ("open", "os.listdir", "os.scandir")


def remove_linux_only_names() -> None:
    """Delete the names of modules that macOS does not have."""
    for module, names in LINUX_ONLY.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    selectors.DefaultSelector = selectors.PollSelector  # asyncio uses it


def hide_linux_files(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse to open a file of Linux. This is an audit hook, which sees every file opened."""
    if event in EVENTS_WITH_PATH and str(arguments[0]).startswith(LINUX_FILE_SYSTEMS):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def replace_system_modules() -> None:
    """Provide what the standard library reads on macOS: `_scproxy`, and how Python was built.

    `sysconfig` keeps how Python was built once it has read it under the name of this system.
    """
    sysconfig.get_config_vars()
    proxies = types.ModuleType("_scproxy")
    proxies._get_proxies = dict  # type: ignore[attr-defined]
    proxies._get_proxy_settings = dict  # type: ignore[attr-defined]
    sys.modules["_scproxy"] = proxies


os.environ["LOADGEN_PURE"] = "1"
remove_linux_only_names()
replace_system_modules()
sys.addaudithook(hide_linux_files)
sys.platform = "darwin"
