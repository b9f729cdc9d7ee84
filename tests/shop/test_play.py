"""The page for people, in Debian's Chromium without a window: what a person sees is what an agent reads, and the tools are the same two."""

import json
import shutil

import pytest

from shop_env.server import ServerThread

from .conftest import KEY

pytestmark = pytest.mark.chromium


@pytest.fixture(scope="module")
def server(shop):
    with ServerThread(shop, privileged_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1280,900", f"user-data-dir={profile}"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield running
    running.quit()


class Person:
    """Acts on the page by what is visible, and waits for what follows."""

    def __init__(self, browser, url):
        from selenium.webdriver.support.ui import Select, WebDriverWait

        self.browser, self._select, self._wait = browser, Select, WebDriverWait(browser, 60)
        browser.get(url + "/play")
        self.until(lambda: len(self._select(self.find("task")).options) > 0)

    def find(self, name):
        return self.browser.find_element("id", name)

    def until(self, condition):
        return self._wait.until(lambda _: condition())

    def text(self, name):
        return self.find(name).get_attribute("textContent")

    def start(self, split, key=""):
        first = self._select(self.find("task")).options[0].get_attribute("value")
        self._select(self.find("split")).select_by_value(split)
        expected = {"train": "task-jacket", "dev": "task-mug"}[split]
        self.until(lambda: self._select(self.find("task")).options[0].get_attribute("value") == expected or first == expected)
        self.find("key").send_keys(key)
        self.browser.find_element("css selector", "#start button").click()
        self.until(lambda: self.text("observation") == "search page")

    def call(self, tool, argument):
        field = self.find({"search": "query", "click": "target"}[tool])
        field.clear()
        field.send_keys(argument)
        self._after(lambda: self.browser.find_element("css selector", f"#{tool} button").click())

    def press(self, target):
        self._after(lambda: self.browser.find_element("css selector", f"#offers [data-target={json.dumps(target)}]").click())

    def _after(self, action):
        before = len(self.browser.find_elements("css selector", "#calls > li"))
        action()
        self.until(lambda: len(self.browser.find_elements("css selector", "#calls > li")) == before + 1)

    def offers(self):
        return [button.get_attribute("data-target") for button in self.browser.find_elements("css selector", "#offers button")]


def errors(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING") and "favicon" not in entry["message"]]


def test_shopping_by_hand_shows_what_an_agent_reads(browser, server):
    person = Person(browser, server.url)
    person.start("train", KEY)
    assert person.text("instruction") == "a hooded jacket" and "likes" in person.text("persona") and "cotton" in person.text("persona")
    person.call("search", "jacket")
    (episode,) = server.service.episodes.values()
    assert person.text("observation") == episode.session.observation
    assert person.text("observation").startswith("results 1-5 of 12 | next | back to search\nA acme hooded jacket")
    assert person.offers() == ["A", "B", "C", "D", "E", "next", "back to search"]
    person.press("next")
    person.call("click", "nonsense")
    assert person.text("observation") == episode.session.observation == "invalid unavailable_target | search | row | next | previous | back to search"
    person.press("B")
    assert person.text("observation") == episode.session.observation
    assert person.offers() == ["colour=red", "colour=dark blue", "size=small", "size=large", "previous", "back to search"]
    person.press("colour=dark blue")
    assert "colour=red" in person.offers() and "buy now" not in person.offers() and "previous" in person.offers()
    person.call("click", "large")
    assert "zz" not in browser.page_source and "31.41" not in browser.page_source  # private words all contain zz
    person.press("buy now")
    assert "purchase" in person.text("outcome") and not person.find("tools").is_displayed() and person.offers() == []
    (reward,) = [e.answer for e in server.service.episodes.values()]
    detail = json.loads(reward)["reward_detail"]
    rows = {row.text.split()[0]: row.text.split()[-1] for row in browser.find_elements("css selector", "#reward tr")}
    assert rows == {name: f"{detail[name]:.3f}" for name in ("r_type", "r_att", "r_opt", "r_price", "loose", "strict")}
    assert "zz secret attribute" in person.text("detail") and "zzid-03" in person.text("detail")  # the key was given
    assert errors(browser) == []


def test_without_a_key_the_goal_stays_hidden_to_the_end(browser, server):
    person = Person(browser, server.url)
    person.start("dev")
    for action in ("A", "buy now"):
        if action == "A":
            person.call("search", "ceramic")
        person.press(action)
    assert "reward 1.000, success" in person.text("outcome")
    assert "goal_product_id" not in browser.page_source and "attribute_targets" not in browser.page_source
    assert errors(browser) == []


def test_refusals_of_the_service_are_shown_and_the_page_goes_on(browser, server):
    person = Person(browser, server.url)
    person.find("key").send_keys("wrong key")
    browser.find_element("css selector", "#start button").click()
    person.until(lambda: person.find("problem").is_displayed())
    assert "not_privileged" in person.text("problem")
    person.find("key").clear()
    browser.find_element("css selector", "#start button").click()
    person.until(lambda: person.text("observation") == "search page")
    assert not person.find("problem").is_displayed()
