"""What all tests need of the process that runs them."""

import signal


def pytest_configure() -> None:
    """Ctrl-C and a closed terminal count: a shell starts background jobs with the first ignored, nohup the second."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
