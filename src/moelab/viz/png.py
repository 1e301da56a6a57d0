"""Pictures of figures from one Chromium that stays, instead of one that starts for each.

plotly asks kaleido 1.5, which starts a Chromium for every figure (1 to 7 s on two busy cores) unless its server runs;
with it a figure takes 0.3 s. The server does not survive a Chromium that fails to start and would then wait for ever,
so a first picture is drawn before the server is believed.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import warnings

FIRST_PICTURE_S = 60.0


def can_draw_png() -> bool:
    """Whether kaleido and a Chromium are here, and the Chromium draws; it goes on running until Python ends."""
    if importlib.util.find_spec("kaleido") is None:
        return False
    from choreographer.browsers.chromium import Chromium  # how kaleido itself looks for the browser

    # choreographer 1.4.0 wakes its reader with "{bye}" as it closes the browser, and under load logs a traceback, as
    # this is no JSON; the picture is complete by then. To go once it knows its own farewell.
    logging.getLogger("choreographer.channels.pipe").setLevel(logging.CRITICAL)
    return Chromium.find_browser(skip_local=False) is not None and _server_draws()


def _server_draws() -> bool:
    import kaleido

    # plotly 7.1 hands over options that a server has had from its start, and kaleido says so for each figure.
    warnings.filterwarnings("ignore", message="The kopts argument is ignored", category=UserWarning)
    kaleido.start_sync_server(n=1, mathjax=False, silence_warnings=True)  # no figure has formulas: no network either
    first = threading.Thread(target=kaleido.calc_fig_sync, args=({"data": [], "layout": {}},), daemon=True)
    first.start()
    first.join(FIRST_PICTURE_S)
    if first.is_alive():
        kaleido._global_server._initialized = False  # kaleido 1.5.0 has no word for a server whose browser is dead
        logging.getLogger(__name__).warning("Chromium does not draw: figures have no PNG here")
        return False
    return True
