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
