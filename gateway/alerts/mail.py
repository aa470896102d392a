"""E-mail by SMTP, in separate threads, so that a slow server delays nothing else."""

import asyncio
import smtplib
import ssl
from concurrent.futures import ThreadPoolExecutor
from email.message import EmailMessage
from email.utils import formatdate
from urllib.parse import unquote, urlsplit

THREADS = 4
SMTP_SECONDS = 10.0
PORTS = {"smtp": 587, "smtps": 465}


class MailFailed(Exception):
    """The server did not take the message. The text names the reason, never the password."""


class Mailer:
    """Sender of messages. url: smtp://user:password@host:port with STARTTLS, or smtps:// with TLS from the start.

    A server with a user name must offer STARTTLS, so that no password is sent in the clear.
    """

    def __init__(self, url: str, sender: str) -> None:
        parts = urlsplit(url)
        self._is_tls = parts.scheme == "smtps"
        self._host, self._port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        self._user = None if parts.username is None else unquote(parts.username)
        self._password = unquote(parts.password or "")
        self._sender = sender
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mail")

    async def send(self, to: str, message_id: str, subject: str, text: str) -> None:
        """Send a message. Raises MailFailed."""
        message = EmailMessage()
        message["From"], message["To"], message["Subject"] = self._sender, to, subject
        message["Date"] = formatdate()
        # The same in every attempt, so that mailboxes recognise a second copy.
        message["Message-ID"] = f"<{message_id}@{self._sender.rpartition('@')[2]}>"
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(text)
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._send, message)
        except smtplib.SMTPResponseException as error:
            raise MailFailed(f"the mail server answered {error.smtp_code}") from error
        except (smtplib.SMTPException, OSError, ValueError) as error:
            raise MailFailed(f"the mail server failed: {type(error).__name__}") from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _send(self, message: EmailMessage) -> None:
        context = ssl.create_default_context()
        if self._is_tls:
            server: smtplib.SMTP = smtplib.SMTP_SSL(self._host, self._port, timeout=SMTP_SECONDS, context=context)
        else:
            server = smtplib.SMTP(self._host, self._port, timeout=SMTP_SECONDS)
        with server:
            server.ehlo()
            if not self._is_tls and (self._user is not None or server.has_extn("starttls")):
                server.starttls(context=context)
                server.ehlo()
            if self._user is not None:
                server.login(self._user, self._password)
            server.send_message(message)
