"""`/console/playground`: one prompt to one or two of the tenant's own models, streamed.

The page's script sends the requests to `/console/playground/chat` (gateway/api/admin/tenant_chats.py).
"""

import re

from aiohttp import web

from gateway.api.scopes import PRINCIPAL
from gateway.pages.adapters.playground import model_context
from gateway.pages.console.access import ConsolePages, needs

QUERY = ("a", "b")
CHAT = "/console/playground/chat"


class ConsolePlayground(ConsolePages):
    """Page of the playground. The key in use pays, within its own limits and models."""

    @needs("inference")
    async def show(self, request: web.Request) -> web.StreamResponse:
        principal = request[PRINCIPAL]
        async with self.console.reads.place(principal.tenant.id):
            found = await self.console.records.adapter_list.models(principal.tenant.id)
        # A key's allowed names include their versions and aliases.
        usable = [each for each in found if principal.may_use(re.split("[@:]", each.id)[0])]
        return self.console.frame.render(
            request,
            "playground.html",
            title="Playground",
            tenant=principal.tenant,
            problem=None,
            names=(),
            chat_url=CHAT,
            requests_url="/console/requests/",
            **model_context(request, [name for name in self.console.base_names if principal.may_use(name)], usable),
        )
