"""The metrics page: where it is bound, and what is said when it cannot be."""

import urllib.error
import urllib.request

import pytest

from shared.errors import ConfigError
from shared.telemetry import MetricsPage
from tests.support.ports import free_port, has_ipv6

HOSTS = [("127.0.0.1", "127.0.0.1"), *([("::1", "[::1]"), ("::", "127.0.0.1"), ("::", "[::1]")] if has_ipv6() else [])]


@pytest.mark.parametrize(("bound", "asked"), HOSTS)
def test_a_page_answers_where_it_is_bound(bound: str, asked: str) -> None:
    with MetricsPage(free_port(), lambda: False, bound) as page:
        where = f"http://{asked}:{page.port}"
        with urllib.request.urlopen(f"{where}/livez", timeout=60) as answer:
            assert answer.read() == b'{"path": "/livez", "ok": true}'
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(f"{where}/readyz", timeout=60)
        refused.value.close()


def test_an_address_that_is_not_ours_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"loader\.metrics_port \(\d+\) cannot be bound at 192\.0\.2\.1"):
        MetricsPage(free_port(), lambda: True, "192.0.2.1", "loader.metrics_port")
