"""Says what is wrong if no encrypted connection to a Prefect server can be made."""

import ssl
from collections.abc import Iterator


def tls_problem(error: BaseException) -> str | None:
    """Return what is wrong with an encrypted connection, and what to do; None for other errors.

    Args:
        error: The error of an HTTP client. Its causes tell whether TLS failed.

    Returns:
        A part of a sentence that can follow the address of the server, such as `has a certificate
        that is not trusted here (self-signed certificate); …`.
    """
    for cause in causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"has a certificate that is not trusted here ({cause.verify_message.strip('.')}); "
                "set PREFECT_API_SSL_CERT_FILE to a file with the certificate of its authority"
            )
        if isinstance(cause, ssl.SSLError):
            reason = (cause.reason or str(cause)).replace("_", " ").lower()
            return (
                f"makes no encrypted connection ({reason}); if it has no TLS, its address in "
                "PREFECT_API_URL begins with http://"
            )
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and the errors that led to it, the newest first.

    An error leads to another one if it was given as its cause, or was being handled at that time.
    """
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
