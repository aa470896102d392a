"""Search box: ids and names lead to their pages, and a whole key never comes into a URL."""


async def test_texts_lead_to_their_pages(gateway):
    acme = await gateway.tenant("acme")
    await gateway.tenant("acme-test")
    key_id = acme.key.split("_")[1]
    async with gateway.browser() as operator:
        for text, place in {
            "req_abc": "/admin/requests/req_abc",
            " chatcmpl-abc ": "/admin/requests/chatcmpl-abc",
            "acme": "/admin/search?q=acme",
            acme.key: f"/admin/search?q={key_id}",
            f"lpx_{key_id}_wrong": f"/admin/search?q=lpx_{key_id}_wrong",
        }.items():
            answer = await operator.submit("/admin/search", q=text)
            assert (answer.status, answer.headers["Location"]) == (303, place)
        for text, place in {"acme": "/admin/tenants/acme", key_id: f"/admin/keys?q={key_id}"}.items():
            answer = await operator.get(f"/admin/search?q={text}")
            assert (answer.status, answer.headers["Location"]) == (303, place)
        several = await operator.get("/admin/search?q=cme")
        assert several.status == 200
        assert several.body.count(b'href="/admin/tenants/acme') == 2
        nothing = await operator.get("/admin/search?q=%25")
        assert b"Nothing matches" in nothing.body


async def test_every_name_that_is_accepted_is_found(gateway):
    """Emoji have format characters; those that reverse the text around them are refused in names."""
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001fae9"
    await gateway.tenant("acme", display_name=f"Acme {family}")
    for path in ("/admin/api/tenants", "/admin/api/search"):
        found = await gateway.admin.get(path, params={"q": family})
        assert found.status == 200, path
        assert b'"acme"' in found.body, path
    async with gateway.browser() as operator:
        assert b"/admin/tenants/acme" in (await operator.get("/admin/tenants", params={"q": family})).body
        found = await operator.get("/admin/search", params={"q": family})
        assert (found.status, found.headers["Location"]) == (303, "/admin/tenants/acme")
    for mark in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\0\n\u2028":
        refused = await gateway.admin.post("/admin/api/tenants", {"name": "odd", "display_name": f"a{mark}b"})
        assert (refused.status, refused.error["param"]) == (400, "display_name"), repr(mark)
        assert (await gateway.admin.get("/admin/api/tenants", params={"q": f"a{mark}b"})).status == 400
